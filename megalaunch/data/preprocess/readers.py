"""Readers of input files: decompressed bytes and lines, rows of parquet and arrow tables, and hashes.

An arrow file is a stream, as written by `save_to_disk` of the package datasets, or a random-access file.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.preprocess.inputs import Input, describe, open_source
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.remote_file import InputPath, RemoteFile
from megalaunch.installation import install_command

_BLOCK = 1 << 20
_AHEAD = 1 << 28  # bytes that hashing may be ahead of the encoding
# Raised by the decompressors for a truncated or corrupt stream.
_CORRUPT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError, ValueError)
_ROWS_AT_ONCE = 256
_FILE_MAGIC = b"ARROW1"


class CorruptStream(Exception):
    """A compressed file that is truncated or does not decompress; the message has the cause."""


class DecompressedStream:
    """The decompressed bytes of an input from its start; `stored` counts the stored bytes consumed so far."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._raw: IO[bytes] = sys.stdin.buffer if source.is_stdin else open_source(source.path)
        self.stored = 0
        self._blocks = self._read()

    def blocks(self) -> Iterator[bytes]:
        """Yield non-empty blocks; raises CorruptStream, or DataError if reading the file fails."""
        try:
            yield from self._blocks
        except _CORRUPT as error:
            # The decompressors raise an OSError without a number for a corrupt stream.
            if not self._source.compression or getattr(error, "errno", None) is not None:
                raise cannot("read it", self._source.path, _as_os_error(error)) from error
            reason = str(error) or type(error).__name__
            raise CorruptStream(f"the {self._source.compression} stream is truncated or corrupt ({reason})") from error
        finally:
            if not self._source.is_stdin:
                self._raw.close()

    def _read(self) -> Iterator[bytes]:
        if self._source.compression == ".zst":
            yield from self._zstandard()
            return
        opened = self._open()
        while block := opened.read(_BLOCK):
            self._count(len(block))
            yield block

    def _open(self) -> Any:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers[self._source.compression](self._raw) if self._source.compression else self._raw

    def _count(self, size: int) -> None:
        self.stored = self.stored + size if self._source.is_stdin else self._raw.tell()

    def _zstandard(self) -> Iterator[bytes]:
        """Decompress zstandard, with windows of up to 2 GiB and any number of frames."""
        zstandard = import_optional("zstandard", self._source.path)
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        frame_ended = True
        while compressed := self._raw.read(_BLOCK // 8):
            while compressed:
                try:
                    block = decompressor.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from None
                frame_ended, compressed = decompressor.eof, decompressor.unused_data if decompressor.eof else b""
                self._count(0)
                if block:
                    yield block
                if frame_ended:  # a file may have several frames
                    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        if not frame_ended:
            raise EOFError("the last frame is not complete")


def lines(path: InputPath) -> Iterator[bytes]:
    """Yield the decompressed lines of a file with their line ends. DataError if it cannot be read or is corrupt."""
    source = describe(path, Format.TEXT)
    if source.is_plain:
        with open_source(path) as file:
            yield from file
        return
    partial = b""
    try:
        for block in DecompressedStream(source).blocks():
            *complete, partial = (partial + block).split(b"\n")
            yield from (line + b"\n" for line in complete)
    except CorruptStream as error:
        raise DataError(str(error), file=path, fix="Copy the file again, or create it again.") from None
    if partial:
        yield partial


def import_optional(module: str, path: InputPath) -> Any:
    """Import an optional package of the extra `data`; DataError naming it if it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise DataError(
            f"reading it needs the package {name}", file=path, fix=f"{install_command('megalaunch[data]')} brings it."
        ) from None


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))


class InputHashes:
    """Hashes the inputs in a thread, from `start` or else from `finish`, which waits for them.

    Remote inputs for which their store has a hash (an etag) are not read a second time.
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._hashes: list[str] = []
        self._error: DataError | None = None
        self._hashed = self._reached = 0
        self._position_changed = threading.Condition()
        self._thread = threading.Thread(target=self._hash_all, daemon=True)

    def start(self) -> None:
        """Start the thread. From then on this process must not fork."""
        self._thread.start()

    def reached(self, position: int) -> None:
        """Report the number of bytes of all inputs that are encoded, which paces the hashing."""
        with self._position_changed:
            self._reached = position
            self._position_changed.notify()

    def finish(self) -> list[str]:
        """Return the hex digest of each input, empty for one that is not hashed. DataError if one cannot be read."""
        self.reached(sum(entry.size for entry in self._inputs))
        if self._thread.ident is None:
            self.start()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._hashes

    def _hash_all(self) -> None:
        try:
            for entry in self._inputs:
                self._hashes.append("" if entry.is_stdin or entry.etag else self._sha256(entry))
        except DataError as error:
            self._error = error

    def _sha256(self, entry: Input) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        with open_source(entry.path) as file:
            while size := file.readinto(block):
                digest.update(block[:size])
                self._hashed += size
                with self._position_changed:
                    self._position_changed.wait_for(lambda: self._hashed <= self._reached + _AHEAD)
        return digest.hexdigest()


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
            parquet = import_optional("pyarrow.parquet", entry.path)
            return list(parquet.ParquetFile(_seekable(entry.path)).schema_arrow.names)
        ipc = import_optional("pyarrow.ipc", entry.path)
        with open_source(entry.path) as file:
            opened = ipc.open_file if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC else ipc.open_stream
        with _arrow_source(entry.path, arrow) as source:
            return list(opened(source).schema.names)
    except (arrow.ArrowException, OSError) as error:
        cause = f"it cannot be read as {entry.format} ({error})"
        raise DataError(cause, file=entry.path, fix="Copy the file again, or create it again.") from error


def _seekable(path: InputPath) -> Any:
    """Return what pyarrow opens: a path, or a remote file."""
    return open_source(path) if isinstance(path, RemoteFile) else path


def _arrow_source(path: InputPath, arrow: Any) -> Any:
    """Return an input file of pyarrow; one on disk is mapped into memory."""
    return arrow.PythonFile(open_source(path), "r") if isinstance(path, RemoteFile) else arrow.memory_map(str(path))


def _parquet(path: InputPath, keys: Sequence[str], start: int) -> Iterator[_Batch]:
    """Yield the record batches of a parquet file from row `start`."""
    table = import_optional("pyarrow.parquet", path).ParquetFile(_seekable(path))
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


def _arrow(path: InputPath, keys: Sequence[str], start: int) -> Iterator[_Batch]:
    """Yield the record batches of an arrow stream or random-access file from row `start`."""
    arrow, ipc = import_optional("pyarrow", path), import_optional("pyarrow.ipc", path)
    row = 0
    with open_source(path) as probe:
        magic = probe.read(len(_FILE_MAGIC))
        size = probe.seek(0, 2)
    if not magic:
        raise arrow.ArrowInvalid("it is empty")
    with _arrow_source(path, arrow) as source:
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


def _check_columns(path: InputPath, names: list[str], keys: Sequence[str]) -> None:
    for key in keys:
        if (count := names.count(key)) > 1:
            fix = "Rename one of them, as it is not known which holds the text."
            raise DataError(f'the table has {count} columns "{key}"', file=path, fix=fix)
        if not count:
            shown = ", ".join(names[:10])
            fix = f"Its columns are {shown}: name the one with the text (--json-key)."
            raise DataError(f'the table has no column "{key}"', file=path, fix=fix)
