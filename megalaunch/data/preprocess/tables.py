"""Reads the rows of parquet and arrow files in parts.

An arrow file is a stream, as written by `save_to_disk` of the package datasets, or a random-access file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import Input, import_optional
from megalaunch.data.preprocess.settings import Format

_ROWS_AT_ONCE = 256
_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table.

    Attributes:
        values: the values under the keys, for each row.
        end: row after the last one.
        stored: bytes of the file that the rows account for.
        is_last: whether the table ends here.
    """

    values: list[tuple[Any, ...]]
    end: int
    stored: int
    is_last: bool


@dataclass(frozen=True)
class _Batch:
    """A record batch.

    Attributes:
        columns: the batch.
        first: its first row.
        before: fraction of the file before the batch.
        share: fraction of the file up to its end.
    """

    columns: Any
    first: int
    before: float
    share: float


def table_rows(entry: Input, keys: Sequence[str], part_bytes: int, start: int = 0) -> Iterator[TablePart]:
    """Yield all rows from `start`, in parts of about `part_bytes`. Raises DataError."""
    arrow = import_optional("pyarrow", entry.path)
    read = _parquet if entry.format is Format.PARQUET else _arrow
    pending: list[tuple[Any, ...]] = []
    size, row, share, counted = 0, start, 0.0, -1
    try:
        for batch in read(entry.path, keys, start):
            if pending and size >= part_bytes:  # another batch follows, so these rows are not the last
                yield TablePart(pending, row, int(entry.size * share) - counted, is_last=False)
                pending, size, counted = [], 0, int(entry.size * share)
            columns = [batch.columns.column(batch.columns.schema.get_field_index(key)) for key in keys]
            rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
            skipped = max(0, start - batch.first)
            if skipped >= len(rows):
                continue
            if counted < 0:
                counted = int(entry.size * (batch.before + (batch.share - batch.before) * skipped / len(rows)))
            pending += rows[skipped:]
            size += sum(column.nbytes for column in columns)
            row, share = batch.first + len(rows), batch.share
    except (arrow.ArrowException, OSError) as error:
        cause = f"it cannot be read as {entry.format} ({error})"
        raise DataError(cause, file=entry.path, fix="Copy the file again, or create it again.") from error
    if pending:
        yield TablePart(pending, row, entry.size - counted, is_last=True)


def table_columns(entry: Input) -> list[str]:
    """Return the names of a table's columns. Raises DataError."""
    arrow = import_optional("pyarrow", entry.path)
    try:
        if entry.format is Format.PARQUET:
            return list(import_optional("pyarrow.parquet", entry.path).ParquetFile(entry.path).schema_arrow.names)
        ipc = import_optional("pyarrow.ipc", entry.path)
        with entry.path.open("rb") as file:
            opened = ipc.open_file if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC else ipc.open_stream
        with arrow.memory_map(str(entry.path)) as source:
            return list(opened(source).schema.names)
    except (arrow.ArrowException, OSError) as error:
        cause = f"it cannot be read as {entry.format} ({error})"
        raise DataError(cause, file=entry.path, fix="Copy the file again, or create it again.") from error


def _parquet(path: Path, keys: Sequence[str], start: int) -> Iterator[_Batch]:
    """Yield the record batches of a parquet file from row `start`."""
    table = import_optional("pyarrow.parquet", path).ParquetFile(path)
    _check_columns(path, table.schema_arrow.names, keys)
    total = table.metadata.num_rows
    # Skip row groups that end before the start.
    group, row = 0, 0
    while group < table.num_row_groups and row + table.metadata.row_group(group).num_rows <= start:
        row += table.metadata.row_group(group).num_rows
        group += 1
    groups = list(range(group, table.num_row_groups))
    for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=list(keys)):
        yield _Batch(batch, row, row / total, (row + batch.num_rows) / total)
        row += batch.num_rows


def _arrow(path: Path, keys: Sequence[str], start: int) -> Iterator[_Batch]:
    """Yield the record batches of an arrow stream or random-access file from row `start`."""
    arrow, ipc = import_optional("pyarrow", path), import_optional("pyarrow.ipc", path)
    row = 0
    with path.open("rb") as probe:
        magic = probe.read(len(_FILE_MAGIC))
        size = probe.seek(0, 2)
    if not magic:
        raise arrow.ArrowInvalid("it is empty")
    with arrow.memory_map(str(path)) as source:
        if magic == _FILE_MAGIC:
            file = ipc.open_file(source)
            count = file.num_record_batches
            batches = ((file.get_batch(number), (number + 1) / count) for number in range(count))
        else:
            file = ipc.open_stream(source)
            batches = ((one, source.tell() / size) for one in file)
        _check_columns(path, file.schema.names, keys)
        before = 0.0
        for batch, after in batches:
            for offset in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = batch.slice(offset, _ROWS_AT_ONCE)
                shares = [before + (after - before) * rows / batch.num_rows for rows in (offset, offset + len(part))]
                if row + len(part) > start:
                    yield _Batch(part, row, *shares)
                row += len(part)
            before = after


def _check_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            shown = ", ".join(names[:10])
            fix = f"Its columns are {shown}: name the one with the text (--json-key)."
            raise DataError(f'the table has no column "{key}"', file=path, fix=fix)
