"""A directory that is there as a whole or not at all: what imports and exports write into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megalaunch.engine.checkpoint import commit
from megalaunch.engine.checkpoint.errors import CheckpointError, free_bytes, no_space, write_error


def require_new(output: Path) -> None:
    """Raises CheckpointError when the name is taken."""
    if output.exists():
        raise CheckpointError(f"{output} exists; name another directory")


Wrote = Callable[[int, int], None]
"""Hears how many bytes of how many are written."""


def count_bytes(total: int, wrote: Wrote) -> Callable[[int], None]:
    """What to call with the bytes of each piece that is written; headers are no part of the total."""
    written = 0

    def count(size: int) -> None:
        nonlocal written
        written += size
        wrote(min(written, total), total)

    return count


@contextmanager
def atomic_directory(output: Path, needed: int) -> Iterator[Path]:
    """A directory to fill with about `needed` bytes: named `output` when the body ends well, else removed.

    Raises CheckpointError when they are not free, and in place of an OSError.
    """
    if free_bytes(output.parent) < needed:
        raise no_space(output, needed, free_bytes(output.parent))
    unfinished = None
    try:
        unfinished = commit.create_temp(output)
        yield unfinished
        commit.commit(unfinished, output)
    except OSError as error:
        raise write_error(output, unfinished, needed, error) from error
    finally:
        if unfinished is not None:
            commit.discard(unfinished)
