"""The error of the data package: where it occurred, the cause, and a fix."""

from __future__ import annotations

import stat
from pathlib import Path


class DataError(Exception):
    """A corpus, tokenizer or token file that cannot be used (exit code 3). The message contains all fields.

    Attributes:
        cause: description of the error.
        file: the file with the error.
        record: the record with the error, counted from 1 (a line of a jsonl file).
        fix: suggestion for the user.
    """

    def __init__(self, cause: str, *, file: Path | str | None = None, record: int | None = None, fix: str = "") -> None:
        self.cause, self.file, self.record, self.fix = cause, file, record, fix
        where = "" if file is None else f"{file}" + (f", line {record}" if record is not None else "") + ": "
        super().__init__(f"{where}{cause}." + (f" {fix}" if fix else ""))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with all its fields, to pass it between processes."""
        return _rebuild, (self.cause, self.file, self.record, self.fix)


def _rebuild(cause: str, file: Path | str | None, record: int | None, fix: str) -> DataError:
    return DataError(cause, file=file, record=record, fix=fix)


def cannot(action: str, file: Path, error: OSError, fix: str = "") -> DataError:
    """Return the DataError of a failed file operation, with the operating system's message."""
    return DataError(f"cannot {action}: {error.strerror or error}", file=file, fix=fix)


def refuse_special_file(path: Path) -> None:
    """Raise DataError for a device, a pipe or a socket, which may never end; OSError if the path does not exist."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError("it is no regular file or folder", file=path, fix="Name a file.")
