"""Opening the files of a run directory: through no symbolic link, and readable by the user and the group alone.

A run directory may lie where others can write. A link planted there must not turn "append to a log" into "overwrite
the file that the link names", so every file is opened with O_NOFOLLOW, and new ones are created exclusively.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FILE_MODE = 0o640
"""Of new files, less the umask: nothing for other users."""
DIRECTORY_MODE = 0o750
"""Of new directories, less the umask."""
PRIVATE_MODE = 0o600
"""Of files that hold a secret."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would block; without effect on regular files


def open_file(path: Path, flags: int, mode: int = FILE_MODE) -> int:
    """A descriptor as `os.open` gives it, of a regular file; raises OSError that names a link or another kind."""
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
    """A descriptor to write a file that is new; what had the name before, a link too, is removed."""
    path.unlink(missing_ok=True)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def append_line_bytes(path: Path, content: bytes) -> None:
    """Append a line with a single write, so that lines of several processes never mix. Raises OSError.

    A last line that a killed writer or a full disk left torn is ended first, or it would take this one with it.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content
        if os.write(descriptor, content) != len(content):  # a full disk can take half of it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory of a run where there is none; raises OSError for a link that another user made.

    A link of one's own is a choice (checkpoints on a larger disk); one of somebody else leads where they want.
    """
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid != os.geteuid():
        raise OSError(errno.ELOOP, "is a symbolic link that another user made", str(path))
