"""File operations that are safe against crashes, concurrent processes and planted symbolic links.

A crash or a power failure leaves an old file or a new one, never a part of it: content is written under a hidden
temporary name in the same directory, synced to disk, and renamed. A rename alone is not enough: a file system may have
stored the new name without the data.

A directory may be writable by other users. A planted link must not turn "append to a log" into "overwrite the link's
target", so files are opened with O_NOFOLLOW and new files are created exclusively.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

FILE_MODE = 0o640
"""Mode of new files, before the umask: no access for other users."""
DIRECTORY_MODE = 0o750
"""Mode of new directories, before the umask."""
PRIVATE_MODE = 0o600
"""Mode of files that hold a secret."""
UMASK_FILE_MODE, UMASK_DIRECTORY_MODE = 0o666, 0o777
"""Modes of an export for other programs: the umask alone decides, as for files that they write."""
PUBLIC_FILE_MODE = 0o644
"""Mode of files that all users may read, such as token files."""
PUBLIC_DIRECTORY_MODE = 0o755
"""Mode of directories that all users may read."""

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a FIFO would block; no effect on regular files
_TEMPORARY = ".unfinished-"  # prefix of a temporary directory's name
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Leftover = Literal["remove", "lock", "reuse"]
"""Treatment of an existing temporary file. All of them refuse or remove a symbolic link in its place.

`remove`: remove the file, which a killed writer left; the caller ensures that there is one writer at a time.
`lock`: hold a lock while writing and overwrite the file of a killed writer; BlockingIOError if its writer is alive.
`reuse`: overwrite the file without releasing its disk space (`reserve_space`).
"""


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


def append_line(path: Path, content: bytes) -> None:
    """Append a line in a single write, so that lines of several processes do not mix. Raises OSError.

    If a killed writer left an incomplete last line, that line is ended first; it would corrupt this one. A part of the
    line that a full disk accepted is removed, so that the line can be written again.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content
        written = os.write(descriptor, content)
        if written != len(content):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)  # of the own part: O_APPEND moves the position
            if os.fstat(descriptor).st_size == end:  # nothing of another process follows
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory if it does not exist. Raises OSError for a link that another user made.

    A user's own link is a choice (checkpoints on a larger disk); another user's link leads where that user wants.
    """
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid != os.geteuid():
        raise OSError(errno.ELOOP, "is a symbolic link that another user made", str(path))


class AtomicFile:
    """A file with a temporary name, which `publish` renames to `path`; `discard` removes it.

    Args:
        path: the final path.
        mode: mode of the file, before the umask.
        leftover: treatment of an existing temporary file.

    Raises:
        OSError: the file cannot be created; BlockingIOError: another process is writing it (`leftover="lock"`).
    """

    def __init__(self, path: Path, mode: int = FILE_MODE, leftover: Leftover = "remove") -> None:
        self.path, self.temporary = path, temporary_path(path)
        self._reused = leftover == "reuse"
        if leftover == "lock":
            descriptor = _open_locked(self.temporary, mode)
        elif leftover == "reuse":
            descriptor = open_file(self.temporary, os.O_WRONLY | os.O_CREAT, mode)
        else:
            descriptor = create_file(self.temporary, mode)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def sync(self) -> None:
        """Sync the content to disk, so that a later rename never publishes a truncated file."""
        self._flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Rename the file to its final path. Call `sync` before, and `sync_directory` after."""
        self._flush()
        self.temporary.replace(self.path)
        self.file.close()

    def discard(self) -> None:
        """Remove the temporary file, unless it was published."""
        if not self.file.closed:
            self.temporary.unlink(missing_ok=True)
            with suppress(OSError):  # closing flushes the buffer, and the disk may be full
                self.file.close()

    def _flush(self) -> None:
        if self._reused:
            self.file.truncate()  # cut off the rest of the old content
        self.file.flush()


@contextmanager
def atomic_file(
    path: Path, mode: int = FILE_MODE, *, leftover: Leftover = "remove", sync: bool = True
) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` if the body succeeds and is removed otherwise.

    Args:
        path: the final path.
        mode: mode of the file, before the umask.
        leftover: treatment of an existing temporary file.
        sync: sync to disk. Without it the file survives a crash of the process, but not of the machine.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    unfinished = AtomicFile(path, mode, leftover)
    try:
        yield unfinished.file
        if sync:
            unfinished.sync()
        unfinished.publish()
    finally:
        with suppress(OSError):
            unfinished.discard()
    if sync:
        sync_directory(path.parent)


def write_file_atomically(
    path: Path, content: str | bytes, mode: int = FILE_MODE, *, leftover: Leftover = "remove", sync: bool = True
) -> None:
    """Replace `path` by `content` (text as UTF-8); the arguments are those of `atomic_file`. Raises OSError."""
    with atomic_file(path, mode, leftover=leftover, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def reserve_space(path: Path, size: int) -> None:
    """Reserve disk space for a later `write_file_atomically(path, ..., leftover="reuse")`. Raises OSError."""
    with os.fdopen(create_file(temporary_path(path)), "wb") as file:
        file.write(b" " * size)


def temporary_path(path: Path) -> Path:
    """Return the hidden temporary name of `path`, in the same directory."""
    return path.with_name(f".{path.name}.unfinished")


def create_temporary_directory(directory: Path, mode: int = DIRECTORY_MODE) -> Path:
    """Create an empty temporary directory with the same parent as `directory`. Raises OSError."""
    temporary = directory.parent / f"{_TEMPORARY}{directory.name}-{os.urandom(4).hex()}"
    temporary.mkdir(mode=mode)
    return temporary


def list_temporary_directories(parent: Path, name: str = "*") -> list[Path]:
    """Return the temporary directories of the directories `name` in `parent`, of writers in progress or killed."""
    return sorted(parent.glob(f"{_TEMPORARY}{name}-*"))


def publish_directory(temporary: Path, directory: Path) -> None:
    """Sync a temporary directory to disk and rename it to `directory`, replacing an existing one. Raises OSError.

    A reader finds the old directory or the new one, complete.
    """
    sync_tree(temporary)  # files that were synced when they were written cost nothing more
    if directory.exists():
        _swap_directories(temporary, directory)
        discard_directory(temporary)
    else:
        temporary.rename(directory)
    sync_directory(directory.parent)


def remove_directory(directory: Path) -> None:
    """Remove a directory, renamed first: a kill leaves a temporary directory, never half of `directory`."""
    temporary = create_temporary_directory(directory)
    directory.rename(temporary)
    discard_directory(temporary)


def discard_directory(directory: Path) -> None:
    """Remove a temporary directory and its contents, if it exists; raises nothing."""
    shutil.rmtree(directory, ignore_errors=True)


def _swap_directories(first: Path, second: Path) -> None:
    """Swap two directories.

    renameat2(RENAME_EXCHANGE) does it atomically. Without it (an old kernel, some file systems) three renames do, and
    `second` is missing for a moment.
    """
    import ctypes  # here, since few processes need it

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE) == 0:
        return
    aside = create_temporary_directory(second)
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def lock_file(path: Path, mode: int = FILE_MODE, waiting: Callable[[], None] | None = None) -> int:
    """Take an exclusive lock on a file, created if it is missing.

    Args:
        path: the file.
        mode: mode of a new file, before the umask.
        waiting: called once if another process holds the lock; this process then waits for it.

    Returns:
        The open descriptor. Closing it releases the lock, as does the end of the process.

    Raises:
        BlockingIOError: another process holds the lock, and `waiting` is None.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        if not try_lock(descriptor):
            if waiting is None:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds its lock", str(path))
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Take an exclusive or shared lock without waiting; return False if another process holds it. Raises OSError."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_no_locks(error: OSError) -> bool:
    """Return whether a lock failed because its file system has none."""
    return error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` still names the open file. Check it after locking: the last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _open_locked(path: Path, mode: int) -> int:
    """Open `path` empty for writing, and lock it. Raises OSError, BlockingIOError if another process holds the lock."""
    while True:
        descriptor = lock_file(path, mode)
        if is_open_at(descriptor, path):
            os.ftruncate(descriptor, 0)
            return descriptor
        os.close(descriptor)  # its writer renamed or removed it between our open and our lock


def sync_file(path: Path) -> None:
    """Sync an existing file and its directory entry to disk; do nothing if it does not exist. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    _sync(descriptor)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync the entries of a directory to disk. Raises OSError."""
    _sync(os.open(directory, os.O_RDONLY | os.O_CLOEXEC))


def sync_tree(directory: Path) -> None:
    """Sync all files and directories below `directory` to disk. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would skip a directory that cannot be listed

    for folder, _, files in os.walk(directory, onerror=fail):
        for name in files:
            _sync(os.open(Path(folder, name), os.O_RDONLY | os.O_CLOEXEC))
        sync_directory(Path(folder))


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
