"""Splits inputs into chunks for the workers, so that reading needs little memory and no record is split.

A chunk of a plain file is only a byte range, which the worker reads itself. Decompressed and remote content is sent to
the worker: so one process holds the connections, and fetches ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import START_AGAIN, TABLES, Input, open_source
from megalaunch.data.preprocess.readers import CorruptStream, DecompressedStream, lines, table_rows
from megalaunch.data.preprocess.settings import Format, Settings
from megalaunch.data.remote_file import InputPath

_SEARCHED_AT_ONCE = 1 << 16
_TEXTS_AT_ONCE = 16  # remote files
# A text file is split into sections of this size at a blank line, of four times this size at any line.
_SECTION_BYTES = 4096


@dataclass(frozen=True)
class ByteRange:
    """Lines of a plain jsonl file, read by the worker."""

    offset: int
    size: int


@dataclass(frozen=True)
class Lines:
    """Decompressed lines; they start with the first line of the file if `offset` is 0."""

    offset: int
    content: bytes


@dataclass(frozen=True)
class Rows:
    """Values of a table's rows, in the order of the keys."""

    values: list[tuple[Any, ...]]


@dataclass(frozen=True)
class WholeFiles:
    """Text files, each one document; `contents` are those of compressed and remote ones, which workers do not read."""

    paths: tuple[InputPath, ...]
    contents: tuple[bytes, ...] | None = None


@dataclass(frozen=True)
class Sections:
    """Sections of a text file, each one document, and the first line of each, from 1."""

    contents: list[bytes]
    first_lines: list[int]


@dataclass(frozen=True)
class Unreadable:
    """A record that cannot be read, and the cause.

    Attributes:
        cause: description of the error.
        fix: suggestion for the user.
        lines: number of lines that it replaces.
        damaged: whether all that follows in the file is lost too; otherwise only this record is too long.
    """

    cause: str
    fix: str
    lines: int
    damaged: bool = False


Body: TypeAlias = ByteRange | Lines | Rows | WholeFiles | Sections | Unreadable


@dataclass(frozen=True)
class Position:
    """A position to resume reading: index of an input, and a byte of its decompressed content or a row."""

    file: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive records.

    Attributes:
        path: their file (the first of several text files).
        body: the records or where to read them.
        stored: bytes of the inputs, as stored, that they account for.
        end: position of the next chunk.
    """

    path: InputPath
    body: Body
    stored: int
    end: Position


def chunks(inputs: Sequence[Input], settings: Settings, start: Position) -> Iterator[Chunk]:
    """Yield all chunks from `start`. Raises DataError for files that cannot be read at all."""
    number = start.file
    while number < len(inputs):
        offset = start.offset if number == start.file else 0
        entry = inputs[number]
        if entry.format is Format.TEXT:
            chunk = _texts(inputs, number, settings)
            yield chunk
            number = chunk.end.file
            continue
        if entry.format in TABLES:
            parts = _rows(entry, number, settings, offset)
        elif entry.is_plain:
            parts = _spans(entry, number, settings, offset)
        else:
            parts = _decompressed_chunks(entry, number, settings, offset)
        yield from parts
        number += 1


def _spans(entry: Input, number: int, settings: Settings, position: int) -> Iterator[Chunk]:
    with open_source(entry.path) as file:
        while position < entry.size:
            end = line_end(file, position + settings.chunk_bytes, entry.size)
            body: Body = ByteRange(position, end - position)
            if end - position > settings.record_bytes:
                end, body = _split_at_long_line(file, position, end, settings)
            if entry.is_remote and isinstance(body, ByteRange):
                body = Lines(position, read_range(file, body, entry.path))
            yield Chunk(entry.path, body, end - position, _after(number, end, entry.size))
            position = end


def read_range(file: BinaryIO, span: ByteRange, path: InputPath) -> bytes:
    """Read a range of a file. DataError if the file has become shorter."""
    file.seek(span.offset)
    content = file.read(span.size)
    if len(content) != span.size:
        raise DataError("it became shorter while it was read", file=path, fix=START_AGAIN)
    return content


def _split_at_long_line(file: BinaryIO, position: int, end: int, settings: Settings) -> tuple[int, Body]:
    """Divide a range over the record limit: return the end and body of the lines before its long last line.

    If the range is that line alone, the body is an unreadable record.
    """
    file.seek(position)
    before = file.read(settings.chunk_bytes).rfind(b"\n") + 1
    if before:
        return position + before, ByteRange(position, before)
    return end, too_long(end - position, settings.record_bytes)


def line_end(file: BinaryIO, position: int, size: int) -> int:
    """Return the end of the line that contains byte `position - 1`."""
    position -= 1
    while position < size:
        file.seek(position)
        found = file.read(_SEARCHED_AT_ONCE).find(b"\n")
        if found >= 0:
            return position + found + 1
        position += _SEARCHED_AT_ONCE
    return size


def _after(number: int, offset: int, size: int) -> Position:
    return Position(number + 1, 0) if offset >= size else Position(number, offset)


def too_long(size: int, limit: int) -> Unreadable:
    """Return the body for a record over the limit."""
    cause = f"the record has {size / 1e6:,.0f} MB, the limit is {limit / 1e6:,.0f} MB"
    return Unreadable(cause, "Raise --max-record-mb if it is text that belongs here.", 1)


def _decompressed_chunks(entry: Input, number: int, settings: Settings, start: int) -> Iterator[Chunk]:
    """Yield chunks of a stream; content before `start` is decompressed and skipped."""
    stream, buffer, read, stored, dropped = DecompressedStream(entry), bytearray(), 0, 0, 0
    end = Position(number + 1, 0)
    try:
        for block in stream.blocks():
            if read < start:  # counted before, up to the end of the block that has `start`
                stored = stream.stored
            buffer += block[max(0, start - read) :]
            read += len(block)
            cut = buffer.rfind(b"\n") + 1
            if dropped and cut:  # the end of a line that was too long to buffer
                rest = buffer.find(b"\n") + 1
                body: Body = too_long(dropped + rest, settings.record_bytes)
                yield Chunk(entry.path, body, stream.stored - stored, Position(number, read - len(buffer) + rest))
                del buffer[:rest]
                dropped, stored, cut = 0, stream.stored, cut - rest
            if cut and len(buffer) >= settings.chunk_bytes:
                offset = read - len(buffer)
                body = Lines(offset, bytes(buffer[:cut]))
                yield Chunk(entry.path, body, stream.stored - stored, Position(number, offset + cut))
                del buffer[:cut]
                stored = stream.stored
            elif not cut and len(buffer) + dropped > settings.record_bytes:
                dropped += len(buffer)
                buffer.clear()
    except CorruptStream as error:
        if buffer.rfind(b"\n") >= 0:
            complete = bytes(buffer[: buffer.rfind(b"\n") + 1])
            yield Chunk(
                entry.path, Lines(read - len(buffer), complete), 0, Position(number, read - len(buffer) + len(complete))
            )
        body = Unreadable(str(error), "Copy the file again, or create it again.", 1, damaged=True)
        yield Chunk(entry.path, body, entry.size - stored, end)
        return
    left = max(stream.stored, entry.size) - stored
    if dropped:
        yield Chunk(entry.path, too_long(dropped + len(buffer), settings.record_bytes), left, end)
    elif buffer:
        yield Chunk(entry.path, Lines(read - len(buffer), bytes(buffer)), left, end)


def _texts(inputs: Sequence[Input], number: int, settings: Settings) -> Chunk:
    """Return a chunk of text file `number` and the files after it, up to the chunk size."""
    first = inputs[number]
    if first.size > settings.record_bytes:
        return Chunk(first.path, too_long(first.size, settings.record_bytes), first.size, Position(number + 1, 0))
    if not first.is_plain:
        return _compressed_text(first, number, settings)
    last, size = number + 1, first.size
    while last < len(inputs) and inputs[last].format is Format.TEXT and inputs[last].is_plain:
        if size + inputs[last].size > settings.chunk_bytes:
            break
        size += inputs[last].size
        last += 1
    paths = tuple(entry.path for entry in inputs[number:last])
    contents = _remote_texts(paths) if any(entry.is_remote for entry in inputs[number:last]) else None
    return Chunk(first.path, WholeFiles(paths, contents), size, Position(last, 0))


def _remote_texts(paths: Sequence[InputPath]) -> tuple[bytes, ...]:
    """Return the contents of texts, several of which are fetched at a time, as a small file costs a round trip."""
    with ThreadPoolExecutor(_TEXTS_AT_ONCE) as threads:
        return tuple(threads.map(read_file, paths))


def read_file(path: InputPath) -> bytes:
    """Return the content of a file. Raises DataError."""
    with open_source(path) as file:
        return file.read()


def _compressed_text(entry: Input, number: int, settings: Settings) -> Chunk:
    """Return a chunk of one compressed text file."""
    content, end = bytearray(), Position(number + 1, 0)
    try:
        for block in DecompressedStream(entry).blocks():
            content += block
            if len(content) > settings.record_bytes:
                return Chunk(entry.path, too_long(len(content), settings.record_bytes), entry.size, end)
    except CorruptStream as error:
        body = Unreadable(str(error), "Copy the file again, or create it again.", 1, damaged=True)
        return Chunk(entry.path, body, entry.size, end)
    return Chunk(entry.path, WholeFiles((entry.path,), (bytes(content),)), entry.size, end)


def _rows(entry: Input, number: int, settings: Settings, start: int) -> Iterator[Chunk]:
    """Yield chunks of a table's rows, from row `start`."""
    for part in table_rows(entry, settings.json_keys, settings.chunk_bytes, start):
        end = Position(number + 1, 0) if part.is_last else Position(number, part.end)
        yield Chunk(entry.path, Rows(part.values), part.stored, end)


def section_chunks(entry: Input, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield chunks of a text file's sections of about 4 kB, which end at blank lines if possible.

    Raises:
        DataError: the file cannot be read, or is compressed and corrupt.
    """
    contents: list[bytes] = []
    first_lines: list[int] = []
    size = offset = 0
    for first_line, content in _sections(entry):
        if contents and size + len(content) > chunk_bytes:
            offset += size
            yield Chunk(entry.path, Sections(contents, first_lines), size, Position(0, offset))
            contents, first_lines, size = [], [], 0
        contents.append(content)
        first_lines.append(first_line)
        size += len(content)
    if contents:
        yield Chunk(entry.path, Sections(contents, first_lines), size, Position(1, 0))


def _sections(entry: Input) -> Iterator[tuple[int, bytes]]:
    """Yield every section with the number of its first line."""
    section: list[bytes] = []
    size, first_line = 0, 1
    for number, line in enumerate(lines(entry.path), start=1):
        section.append(line)
        size += len(line)
        if size >= (_SECTION_BYTES if not line.strip() else 4 * _SECTION_BYTES):
            yield first_line, b"".join(section)
            section, size, first_line = [], 0, number + 1
    if section:
        yield first_line, b"".join(section)
