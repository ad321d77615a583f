"""The records of a chunk (lines, rows, text files and their sections): their line, and their texts under the keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import (
    ByteRange,
    Chunk,
    Lines,
    Rows,
    Sections,
    Unreadable,
    WholeFiles,
    read_file,
    read_range,
)
from megalaunch.data.preprocess.inputs import open_source
from megalaunch.data.remote_file import InputPath

# Raised by the fast path for a line that is not an object with texts under the keys.
_UNUSUAL = (ValueError, KeyError, TypeError, RecursionError)
_FIRST, _LATER = 1, 2  # line numbers for record_sentences, which removes a byte order mark from line 1
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ONLY_UTF8 = "Convert it to UTF-8 (iconv -f latin1 -t utf-8 ...), or leave it out by a glob."


@dataclass(frozen=True, slots=True)
class Record:
    """One record before parsing.

    Attributes:
        path: its file.
        keys: JSON keys or columns of its texts.
        source: a line, a text file or a section of one as bytes, or the values of a table row.
        is_text: whether it is a text file or a section, which is one document of several lines.
        first_line: of a text, its first line in the file, from 1; of another record 1 if it is the first of its file.
        lists: whether a value may be a list of texts.
    """

    path: InputPath
    keys: tuple[str, ...]
    source: bytes | tuple[Any, ...]
    is_text: bool = False
    first_line: int = _LATER
    lists: bool = True

    def sentences(self) -> list[Sequence[str]]:
        """Return the sentences under each key; DataError with the cause, and the line if it is a text."""
        if isinstance(self.source, tuple):
            return _row(self.source, self.keys, self.path, self.lists)
        if self.is_text:
            return [[_text(self.source, self.path, self.first_line)]] * len(self.keys)
        return _line(self.source, self.keys, self.path, self.first_line, self.lists)

    def content(self) -> bytes:
        """Return the record as it was read; a table row as JSON."""
        if isinstance(self.source, bytes):
            return self.source
        return json.dumps(dict(zip(self.keys, self.source, strict=True)), default=repr).encode()


def read_lines(chunk: Chunk) -> Chunk:
    """Return the chunk with its lines read from the file. DataError if the file cannot be read any more."""
    if not isinstance(chunk.body, ByteRange):
        return chunk
    return replace(chunk, body=Lines(chunk.body.offset, _read_range(chunk.path, chunk.body)))


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
        found = list(map(_parse_fast, lines))
        texts = [list(map(itemgetter(key), found)) for key in keys]
    except _UNUSUAL:
        return None
    return texts if all(set(map(type, column)) == {str} for column in texts) else None


def records(chunk: Chunk, keys: tuple[str, ...], lists: bool = True) -> Iterator[Record]:
    """Yield all records of a chunk, whose values may be lists of texts with `lists`.

    Raises:
        DataError: the file cannot be read any more.
    """
    body = chunk.body
    if isinstance(body, Rows):
        for values in body.values:
            yield Record(chunk.path, keys, values, lists=lists)
    elif isinstance(body, WholeFiles):
        for number, path in enumerate(body.paths):
            yield Record(path, keys, body.contents[number] if body.contents else read_file(path), True, _FIRST)
    elif isinstance(body, Sections):
        for first_line, content in zip(body.first_lines, body.contents, strict=True):
            yield Record(chunk.path, keys, content, True, first_line)
    elif isinstance(body, ByteRange | Lines):
        content = body.content if isinstance(body, Lines) else _read_range(chunk.path, body)
        first_line = _FIRST if body.offset == 0 else _LATER
        for line in _lines(content):
            yield Record(chunk.path, keys, line, False, first_line, lists)
            first_line = _LATER


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
    view, lines, start = memoryview(content), [], 0
    while (end := content.find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    if start < len(content):
        lines.append(view[start:])
    return lines


def _line(line: bytes, keys: tuple[str, ...], path: InputPath, number: int, lists: bool) -> list[Sequence[str]]:
    try:  # fast path for nearly every line; record_sentences handles the others and reports the errors
        record = _parse_fast(line)
        found = [record[key] for key in keys]
        if all(type(text) is str for text in found):
            return [[text] for text in found]
    except _UNUSUAL:
        pass
    return [record_sentences(line, key, path, number, lists) for key in keys]


def _fast_parser() -> Callable[[bytes | memoryview], Any]:
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


_parse_fast = _fast_parser()


def _row(values: tuple[Any, ...], keys: tuple[str, ...], path: InputPath, lists: bool) -> list[Sequence[str]]:
    texts = (decode_utf8(value, path) if isinstance(value, bytes) else value for value in values)
    return [_check_texts(value, key, path, _LATER, lists) for key, value in zip(keys, texts, strict=True)]


def _text(content: bytes, path: InputPath, first_line: int) -> str:
    if b"\0" in content:
        line = first_line + content.count(b"\n", 0, content.index(b"\0"))
        fix = "Leave it out, for instance by a glob of the text files: 'FOLDER/**/*.txt'."
        raise DataError("it holds NUL bytes: no text, or a damaged file", file=path, record=line, fix=fix)
    return decode_utf8(content, path, first_line)


def _read_range(path: InputPath, span: ByteRange) -> bytes:
    with open_source(path) as file:
        return read_range(file, span, path)


def record_sentences(line: bytes, json_key: str, path: InputPath, number: int, lists: bool = True) -> list[str]:
    """Return the text of one jsonl line as a list; with `lists` the value may be a list of texts, as in Megatron.

    Raises:
        DataError: with file, line `number` and cause.
    """
    return _check_texts(_value(line, json_key, path, number), json_key, path, number, lists)


def _check_texts(value: Any, json_key: str, path: InputPath, number: int, lists: bool) -> list[str]:
    """Return a record's value as a list of texts; DataError if it is neither a text nor (`lists`) several."""
    sentences = value if lists and isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise DataError(f'"{json_key}" holds {_kind(sentence)}, not text', file=path, record=number)
        if (half := find_lone_surrogate(sentence)) is not None:
            raise DataError(f'"{json_key}" holds half a character ({half})', file=path, record=number)
    return sentences


def _value(line: bytes, json_key: str, path: InputPath, number: int) -> Any:
    """Parse a jsonl line and return its value under the key."""
    if number == 1:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if b"\0" in line:
        column = line.index(b"\0") + 1
        raise DataError(f"a NUL byte in column {column:,}: the file is damaged", file=path, record=number)
    record = parse_json_line(decode_utf8(line, path, number), path, number)
    if not isinstance(record, dict):
        raise DataError(f"a record is a JSON object, this is {_kind(record)}", file=path, record=number)
    if json_key not in record:
        keys = ", ".join(list(record)[:5]) or "none"
        fix = f"Its keys are {keys}: name the one with the text (data.json_key, or --json-key)."
        raise DataError(f'the record has no key "{json_key}"', file=path, record=number, fix=fix)
    return record[json_key]


def find_lone_surrogate(text: str) -> str | None:
    """Return half of a surrogate pair, as its escape; None without one. JSON can encode it, no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def parse_json_line(line: str | bytes, path: InputPath, number: int) -> Any:
    """Parse a line of a jsonl file; DataError with file, line and cause."""
    try:
        return json.loads(line)
    except ValueError as error:
        where = f"{error.msg}: column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        cause = "the line is empty" if not line.strip() else f"no JSON ({where})"
        raise DataError(cause, file=path, record=number, fix="A jsonl file holds one JSON object a line.") from None
    except RecursionError:
        raise DataError("JSON nested too deeply", file=path, record=number) from None


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "a list")


def decode_utf8(content: bytes, path: InputPath, first_line: int = 1) -> str:
    """Decode UTF-8; DataError with the line, where `content` begins in line `first_line` of the file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start)
        cause = f"no UTF-8 text (byte 0x{content[error.start]:02x} in column {column:,})"
        raise DataError(cause, file=path, record=line, fix=_ONLY_UTF8) from None
