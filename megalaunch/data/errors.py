"""The error of the data package (where, cause, fix), and the file operations that raise it."""

from __future__ import annotations

import stat
from pathlib import Path

from megalaunch.fs import PUBLIC_FILE_MODE, AtomicFile


class DataError(Exception):
    """A corpus, tokenizer or token file that cannot be used (exit code 3). The message contains all fields.

    Attributes:
        cause: description of the error.
        file: the file with the error: a path, or what prints as its name.
        record: the record with the error, counted from 1 (a line of a jsonl file).
        fix: suggestion for the user.
    """

    def __init__(self, cause: str, *, file: object | None = None, record: int | None = None, fix: str = "") -> None:
        self.cause, self.file, self.record, self.fix = cause, file, record, fix
        where = "" if file is None else f"{file}" + (f", line {record}" if record is not None else "") + ": "
        super().__init__(f"{where}{cause}." + (f" {fix}" if fix else ""))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with all its fields, to pass it between processes."""
        return _rebuild, (self.cause, self.file, self.record, self.fix)


def _rebuild(cause: str, file: object | None, record: int | None, fix: str) -> DataError:
    return DataError(cause, file=file, record=record, fix=fix)


def cannot(action: str, file: object, error: OSError, fix: str = "") -> DataError:
    """Return the DataError of a failed file operation, with the operating system's message."""
    return DataError(f"cannot {action}: {error.strerror or error}", file=file, fix=fix)


def refuse_special_file(path: Path) -> None:
    """Raise DataError for a device, a pipe or a socket, which may never end; OSError if the path does not exist."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError("it is neither a regular file nor a directory", file=path, fix="Give a file or a directory.")


def open_output(path: Path) -> AtomicFile:
    """Open a file that gets the name `path` when it is published, and create its directory.

    Raises:
        DataError: the file cannot be created, or another process is writing it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return AtomicFile(path, PUBLIC_FILE_MODE, leftover="lock")
    except BlockingIOError:
        fix = "Wait for it, or choose another name."
        raise DataError("another process is writing this file", file=path, fix=fix) from None
    except OSError as error:
        raise cannot("write here", path, error, "Choose a directory with write permission.") from error
