"""The one error of the data wing: where it is, what is wrong, what to do."""

from __future__ import annotations

from pathlib import Path


class DataError(Exception):
    """A corpus, a tokenizer or a token file that cannot be used (exit code 3).

    `file` and `record` say where (a record is the line of a jsonl file, from 1), `cause` what is wrong
    there, and `fix` what the user can do about it. The text of the error holds all of them.
    """

    def __init__(self, cause: str, *, file: Path | str | None = None, record: int | None = None, fix: str = "") -> None:
        self.cause, self.file, self.record, self.fix = cause, file, record, fix
        where = "" if file is None else f"{file}" + (f", line {record}" if record is not None else "") + ": "
        super().__init__(f"{where}{cause}." + (f" {fix}" if fix else ""))

    def __reduce__(self) -> tuple[object, ...]:
        """Let the error cross a process boundary with all its fields."""
        return _rebuild, (self.cause, self.file, self.record, self.fix)


def _rebuild(cause: str, file: Path | str | None, record: int | None, fix: str) -> DataError:
    return DataError(cause, file=file, record=record, fix=fix)


def cannot(action: str, file: Path, error: OSError, fix: str = "") -> DataError:
    """The DataError of a failed file operation, in the operating system's words."""
    return DataError(f"cannot {action}: {error.strerror or error}", file=file, fix=fix)
