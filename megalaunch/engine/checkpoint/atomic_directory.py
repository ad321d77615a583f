"""A directory that appears complete or not at all: the output of imports and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megalaunch.engine.checkpoint.errors import CheckpointError, free_bytes, no_space, write_error
from megalaunch.fs import (
    DIRECTORY_MODE,
    create_temporary_directory,
    discard_directory,
    make_directory,
    publish_directory,
)


def require_new(output: Path) -> None:
    """Raise CheckpointError if `output` exists."""
    if output.exists():
        raise CheckpointError(f"{output} exists; name another directory")


Wrote = Callable[[int, int], None]
"""Progress callback: (bytes written, total bytes)."""


def count_bytes(total: int, wrote: Wrote) -> Callable[[int], None]:
    """Return a callback that takes the size of each write and reports the running total to `wrote`.

    `total` counts tensor data only. File headers may push the sum past it, so the reported count is capped at `total`.
    """
    written = 0

    def count(size: int) -> None:
        nonlocal written
        written += size
        wrote(min(written, total), total)

    return count


@contextmanager
def atomic_directory(output: Path, needed: int, mode: int = DIRECTORY_MODE) -> Iterator[Path]:
    """Yield a temporary directory; rename it to `output` on success, remove it on failure.

    Args:
        output: the final path. Must not exist (`require_new`).
        needed: estimated size in bytes, checked against the free space before anything is written.
        mode: mode of the directory, before the umask.

    Raises:
        CheckpointError: too little space is free; also in place of any OSError of the body.
    """
    if free_bytes(output.parent) < needed:
        raise no_space(output, needed, free_bytes(output.parent))
    unfinished = None
    try:
        make_directory(output.parent)
        unfinished = create_temporary_directory(output, mode)
        yield unfinished
        publish_directory(unfinished, output)
    except OSError as error:
        raise write_error(output, unfinished, needed, error) from error
    finally:
        if unfinished is not None:
            discard_directory(unfinished)
