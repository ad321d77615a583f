"""Parses the records of a chunk: their place in the file, and their texts under the JSON keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import ByteRange, Chunk, Lines, Rows, Unreadable, WholeFiles
from megalaunch.data.preprocess.corpus import decode_utf8, record_sentences, split_sentences
from megalaunch.data.preprocess.inputs import START_AGAIN
from megalaunch.data.preprocess.source_files import open_source

# Raised by the fast path for a line that is not an object with texts under the keys.
_UNUSUAL = (ValueError, KeyError, TypeError, RecursionError)
_FIRST, _LATER = 1, 2  # line numbers for record_sentences, which removes a byte order mark from line 1


@dataclass(frozen=True, slots=True)
class Record:
    """One record before parsing.

    Attributes:
        path: its file.
        number: its index in the chunk, from 0; None if it is a whole file.
        keys: JSON keys or columns of its texts.
        source: a line or file as bytes, or the values of a table row.
        first: whether it is the first line of its file.
    """

    path: Path
    number: int | None
    keys: tuple[str, ...]
    source: bytes | tuple[Any, ...]
    first: bool = False

    def sentences(self) -> list[Sequence[str]]:
        """Return the sentences under each key; DataError with the cause if the record is invalid."""
        if self.number is None:
            assert isinstance(self.source, bytes)
            return [[_text(self.source, self.path)]] * len(self.keys)
        if isinstance(self.source, bytes):
            return _line(self.source, self.keys, self.path, _FIRST if self.first else _LATER)
        return _row(self.source, self.keys, self.path)

    def content(self) -> bytes:
        """Return the record as it was read; a table row as JSON."""
        if isinstance(self.source, bytes):
            return self.source
        return json.dumps(dict(zip(self.keys, self.source, strict=True)), default=repr).encode()


def read(chunk: Chunk) -> Chunk:
    """Return the chunk with its lines read from the file. DataError if the file cannot be read any more."""
    if not isinstance(chunk.body, ByteRange):
        return chunk
    return replace(chunk, body=Lines(chunk.body.offset, _part(chunk.path, chunk.body)))


def plain_texts(chunk: Chunk, keys: tuple[str, ...], record_bytes: int) -> list[list[str]] | None:
    """Return the texts of all records for each key, or None if any record is not a plain line with texts.

    Nearly all jsonl chunks take this path, which is an order of magnitude faster than parsing records one by one.
    """
    if not isinstance(chunk.body, Lines):
        return None
    lines = _views(chunk.body.content)
    if max(map(len, lines), default=0) >= record_bytes:
        return None
    try:
        found = list(map(_parse, lines))
        texts = [list(map(itemgetter(key), found)) for key in keys]
    except _UNUSUAL:
        return None
    return texts if all(set(map(type, column)) == {str} for column in texts) else None


def records(chunk: Chunk, keys: tuple[str, ...]) -> Iterator[Record]:
    """Yield all records of a chunk; DataError if its file cannot be read any more."""
    body = chunk.body
    if isinstance(body, Rows):
        for number, values in enumerate(body.values):
            yield Record(chunk.path, number, keys, values)
    elif isinstance(body, WholeFiles):
        for path in body.paths:
            yield Record(path, None, keys, _whole(path) if body.content is None else body.content)
    elif isinstance(body, ByteRange | Lines):
        content = body.content if isinstance(body, Lines) else _part(chunk.path, body)
        for number, line in enumerate(_lines(content)):
            yield Record(chunk.path, number, keys, line, number == 0 and body.offset == 0)


def valid_texts(chunk: Chunk, keys: tuple[str, ...], characters: int) -> list[str]:
    """Return the texts of the first valid records of a chunk, up to a total of `characters`."""
    texts: list[str] = []
    if isinstance(chunk.body, Unreadable):
        return texts
    for record in records(chunk, keys):
        try:
            found = [text for sentences in record.sentences() for text in sentences]
        except DataError:
            continue
        texts += found
        characters -= sum(map(len, found))
        if characters <= 0:
            break
    return texts


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _views(content: bytes) -> list[memoryview]:
    """Return the lines as views, without copying."""
    whole, lines, start = memoryview(content), [], 0
    while (end := content.find(b"\n", start)) >= 0:
        lines.append(whole[start:end])
        start = end + 1
    if start < len(content):
        lines.append(whole[start:])
    return lines


def _line(line: bytes, keys: tuple[str, ...], path: Path, number: int) -> list[Sequence[str]]:
    try:  # fast path for nearly every line; record_sentences handles the others and reports the errors
        record = _parse(line)
        found = [record[key] for key in keys]
        if all(type(text) is str for text in found):
            return [[text] for text in found]
    except _UNUSUAL:
        pass
    return [record_sentences(line, key, path, number) for key in keys]


def _parser() -> Callable[[bytes | memoryview], Any]:
    """Return orjson's parser if it is installed: it accepts a subset of `json`'s input, with the same values."""
    try:
        import orjson
    except ImportError:
        return _standard_parse
    parse: Callable[[bytes | memoryview], Any] = orjson.loads
    return parse


def _standard_parse(line: bytes | memoryview) -> Any:
    text = str(line, "utf-8")
    if "\\ud" in text or "\\uD" in text:  # possibly a lone surrogate, which json accepts
        raise ValueError
    return json.loads(text)


_parse = _parser()


def _row(values: tuple[Any, ...], keys: tuple[str, ...], path: Path) -> list[Sequence[str]]:
    texts = (decode_utf8(value, path) if isinstance(value, bytes) else value for value in values)
    return [split_sentences(value, key, path, _LATER) for key, value in zip(keys, texts, strict=True)]


def _text(content: bytes, path: Path) -> str:
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise DataError("it holds NUL bytes: no text, or a damaged file", file=path, record=line)
    return decode_utf8(content, path)


def _whole(path: Path) -> bytes:
    with open_source(path) as file:
        return file.read()


def _part(path: Path, span: ByteRange) -> bytes:
    with open_source(path) as file:
        file.seek(span.offset)
        content = file.read(span.size)
    if len(content) != span.size:
        raise DataError("it became shorter while it was read", file=path, fix=START_AGAIN)
    return content
