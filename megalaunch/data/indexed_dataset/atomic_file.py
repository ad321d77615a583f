"""Files that appear under their final name complete or not at all.

A file is written under a hidden name in the same directory, flushed to disk and renamed. Its writer holds a lock on it,
so that a second writer is refused and the leftover of a killed one is overwritten.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megalaunch.data.errors import DataError, cannot


class AtomicFile:
    """A hidden file that `publish` renames to `final`; `discard` removes it."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.with_name(f".{final.name}.unfinished")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            self.file = _open_exclusive(self.path)
        except OSError as error:
            raise cannot("write here", final, error, "Choose a folder that you may write to.") from error

    def sync(self) -> None:
        """Flush the file to disk, so that a later rename never publishes a truncated file."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Rename the synced file to its final name."""
        self.path.replace(self.final)
        self.file.close()

    def discard(self) -> None:
        """Remove the hidden file, if it was not published."""
        if not self.file.closed:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes the buffer, and the disk may be full
                self.file.close()


def _open_exclusive(path: Path) -> BinaryIO:
    """Open `path` empty for writing, as its only writer; DataError if another process is writing it."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                "another process is writing this file", file=path, fix="Wait for it, or choose another name."
            ) from None
        # Between open and lock the previous writer may have renamed or removed the file: then open it again.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            return file
        file.close()
