"""Open the files of a run directory without following symbolic links, readable only by the user and the group.

A run directory may be in a place where others can write. A planted link must not turn "append to a log" into
"overwrite the link's target", so files are opened with O_NOFOLLOW and new files are created exclusively.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FILE_MODE = 0o640
"""Mode of new files, before the umask: no access for other users."""
DIRECTORY_MODE = 0o750
"""Mode of new directories, before the umask."""
PRIVATE_MODE = 0o600
"""Mode of files that hold a secret."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a FIFO would block; no effect on regular files


def open_file(path: Path, flags: int, mode: int = FILE_MODE) -> int:
    """Open a regular file and return its descriptor, as `os.open`. Raises OSError for a link or another file type."""
    try:
        descriptor = os.open(path, flags | _SAFE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def create_file(path: Path, mode: int = FILE_MODE) -> int:
    """Create a new file and return its writable descriptor. An existing file or link of that name is removed."""
    path.unlink(missing_ok=True)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def append_line_bytes(path: Path, content: bytes) -> None:
    """Append a line in a single write, so that lines of several processes do not mix. Raises OSError.

    If a killed writer or a full disk left an incomplete last line, that line is ended first; it would corrupt this one.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content
        if os.write(descriptor, content) != len(content):  # a full disk may accept only a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory of a run if it does not exist. Raises OSError for a link that another user made.

    A user's own link is a choice (checkpoints on a larger disk); another user's link leads where that user wants.
    """
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid != os.geteuid():
        raise OSError(errno.ELOOP, "is a symbolic link that another user made", str(path))
