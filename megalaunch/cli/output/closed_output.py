"""Output whose reader goes away (`megalaunch train ... | head -3`): what is printed is lost, the work is not."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EIO)  # a closed pipe, a terminal that was closed


class _IgnoreBrokenPipe(io.FileIO):
    """A file descriptor that leads nowhere from the moment its reader is gone."""

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]  # None: it would block
        """Write, or drop the data."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def ignore_broken_pipe() -> None:
    """Let standard output and error survive their readers; for commands that make files and have to finish them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # none, or one in memory
            continue
        stream.flush()
        raw = _IgnoreBrokenPipe(descriptor, "wb", closefd=False)
        lossy = io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
        )
        setattr(sys, name, lossy)
