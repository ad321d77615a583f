"""A directory that is there as a whole or not at all: what imports and exports write into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalaunch.engine.checkpoint import publish
from megalaunch.engine.checkpoint.errors import CheckpointError, free_bytes, no_space, write_error


def require_new(output: Path) -> None:
    """Raises CheckpointError when the name is taken."""
    if output.exists():
        raise CheckpointError(f"{output} exists; name another directory")


@contextmanager
def written_whole(output: Path, needed: int) -> Iterator[Path]:
    """A directory to fill with about `needed` bytes: named `output` when the body ends well, else removed.

    Raises CheckpointError when they are not free, and in place of an OSError.
    """
    if free_bytes(output.parent) < needed:
        raise no_space(output, needed, free_bytes(output.parent))
    unfinished = None
    try:
        unfinished = publish.begin(output)
        yield unfinished
        publish.publish(unfinished, output)
    except OSError as error:
        raise write_error(output, unfinished, needed, error) from error
    finally:
        if unfinished is not None:
            publish.discard(unfinished)
