"""The documents of a corpus, in a stable order: Python's standard library, or a user's text, jsonl and table files."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import TABLES, describe, lines
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.preprocess.source_files import TRAIN, CorpusFile, list_files, select_files, walk_files
from megalaunch.data.preprocess.tables import table_rows

# Tests and data tables, and site-packages, which differ between machines.
_STANDARD_LIBRARY_LEAVES_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A single text file is split into documents of this size at a blank line, of four times this size at any line.
_SECTION_BYTES = 4096
_ROWS_BYTES = 2 << 20  # bytes of a table in memory at a time
_ONLY_UTF8 = "Convert it to UTF-8 (iconv -f latin1 -t utf-8 ...), or leave it out by a glob."


@dataclass(frozen=True)
class Document:
    """One document. `name` does not depend on the corpus's location; its hash selects documents for validation."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Text files (one document each), jsonl and table files (one document a line or row, named `file:line`).

    Files may be compressed. A single text file would be one document, which cannot be split into training and
    validation: it is split into sections of about 4 kB, named `file:first line`, at blank lines if possible.
    """

    files: tuple[CorpusFile, ...]
    json_key: str
    notes: tuple[str, ...] = ()  # one for each group of files left out

    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size() for file in self.files)

    def documents(self, bad: Callable[[DataError], None] | None = None) -> Iterator[Document]:
        """Yield all documents in order, including empty ones; reads the files again on every call.

        Args:
            bad: called with the error of each invalid record, which is skipped; None: the error is raised.

        Raises:
            DataError: text that is not UTF-8, a line that is not a JSON object with text under `json_key`, or a
                compressed file that is truncated or corrupt.
        """
        alone = len(self.files) == 1
        for file in self.files:
            kind = describe(file.path, Format.AUTO).format
            if kind in TABLES:
                found = _rows(file, self.json_key)
            elif kind is Format.JSONL:
                found = _records(file)
            elif alone:
                found = _sections(file)
            else:
                found = iter([_RawDocument(file, b"".join(lines(file.path)))])
            for one in found:
                try:
                    document = one.document(self.json_key)
                except DataError as error:
                    if bad is None:
                        raise
                    bad(error)
                else:
                    yield document


def find_corpus(source: str, json_key: str, split: str | None = TRAIN) -> Corpus:
    """Return the corpus that `data.corpus` names: `python-stdlib`, a file, a directory or a glob.

    Files are sorted by their path relative to the directory, or to the part of a glob before its first wildcard.
    Hidden files and directories are left out.

    Args:
        source: value of `data.corpus`.
        json_key: key or column of the text.
        split: split of a dataset directory (source_files.py) to read; None: several splits are an error.

    Raises:
        DataError: nothing matches.
    """
    from megalaunch.config.schema.data import STANDARD_LIBRARY  # here, so that preprocessing does not import the schema

    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        return Corpus(walk_files(root, _STANDARD_LIBRARY_LEAVES_OUT, ".py"), json_key)
    found = list_files(source)
    if not found:
        fix = f"data.corpus takes a file, a folder, a glob or {STANDARD_LIBRARY}."
        raise DataError("no such corpus", file=Path(source).expanduser(), fix=fix)
    folder = Path(source).expanduser()
    if folder.is_dir():
        chosen = select_files(folder, found, split)
        return Corpus(chosen.files, json_key, chosen.notes)
    return Corpus(found, json_key)


def record_text(line: bytes, json_key: str, path: Path, number: int) -> str:
    """Return the text of one jsonl line; DataError with file, line and cause."""
    return _validate_text(_value(line, json_key, path, number), json_key, path, number)


def _validate_text(text: Any, json_key: str, path: Path, number: int) -> str:
    if not isinstance(text, str):
        raise DataError(f'"{json_key}" holds {_kind(text)}, not text', file=path, record=number)
    _reject_lone_surrogates(text, json_key, path, number)
    return text


def record_sentences(line: bytes, json_key: str, path: Path, number: int) -> list[str]:
    """Return the text of one jsonl line as a list; as in Megatron, the value may be a list of texts (sentences)."""
    return split_sentences(_value(line, json_key, path, number), json_key, path, number)


def split_sentences(value: Any, json_key: str, path: Path, number: int) -> list[str]:
    """Return a record's value as a list of sentences; DataError if it is neither a text nor a list of texts."""
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise DataError(f'"{json_key}" holds {_kind(sentence)}, not text', file=path, record=number)
        _reject_lone_surrogates(sentence, json_key, path, number)
    return sentences


def _value(line: bytes, json_key: str, path: Path, number: int) -> Any:
    """Parse a jsonl line and return its value under the key."""
    if number == 1:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if b"\0" in line:
        column = line.index(b"\0") + 1
        raise DataError(f"a NUL byte in column {column:,}: the file is damaged", file=path, record=number)
    record = _parse(decode_utf8(line, path, number), path, number)
    if not isinstance(record, dict):
        raise DataError(f"a record is a JSON object, this is {_kind(record)}", file=path, record=number)
    if json_key not in record:
        keys = ", ".join(list(record)[:5]) or "none"
        fix = f"Its keys are {keys}: name the one with the text (data.json_key, or --json-key)."
        raise DataError(f'the record has no key "{json_key}"', file=path, record=number, fix=fix)
    return record[json_key]


def _reject_lone_surrogates(text: str, json_key: str, path: Path, number: int) -> None:
    """Raise DataError for half of a surrogate pair, which JSON can encode and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f'"{json_key}" holds half a character ({half})', file=path, record=number) from None


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        cause = "the line is empty" if not line.strip() else f"no JSON ({error})"
        raise DataError(cause, file=path, record=number, fix="A jsonl file holds one JSON object a line.") from None
    except RecursionError:
        raise DataError("JSON nested too deeply", file=path, record=number) from None


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "a list")


def decode_utf8(content: bytes, path: Path, first_line: int = 1) -> str:
    """Decode UTF-8; DataError with the line, where `content` begins in line `first_line` of the file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start)
        cause = f"no UTF-8 text (byte 0x{content[error.start]:02x} in column {column:,})"
        raise DataError(cause, file=path, record=line, fix=_ONLY_UTF8) from None


@dataclass(frozen=True)
class _RawDocument:
    """An unparsed document: a text, a section of one (`line` is its first line), a jsonl line, or a row's value."""

    file: CorpusFile
    content: Any
    line: int | None = None
    kind: Format = Format.TEXT

    def document(self, json_key: str) -> Document:
        """Parse it; DataError if it is invalid."""
        path, line = self.file.path, self.line
        name = self.file.name if line is None else f"{self.file.name}:{line}"
        if self.kind is Format.TEXT:
            return Document(name, decode_utf8(self.content, path, line or 1))
        assert line is not None, "only text has no line"
        if self.kind is Format.JSONL:
            return Document(name, record_text(self.content, json_key, path, line))
        text = decode_utf8(self.content, path, line) if isinstance(self.content, bytes) else self.content
        return Document(name, _validate_text(text, json_key, path, line))


def _rows(file: CorpusFile, json_key: str) -> Iterator[_RawDocument]:
    number = 0
    for part in table_rows(describe(file.path, Format.AUTO), (json_key,), _ROWS_BYTES):
        for (value,) in part.values:
            number += 1
            yield _RawDocument(file, value, number, Format.PARQUET)


def _records(file: CorpusFile) -> Iterator[_RawDocument]:
    return (_RawDocument(file, line, number, Format.JSONL) for number, line in enumerate(lines(file.path), start=1))


def _sections(file: CorpusFile) -> Iterator[_RawDocument]:
    """Split a text file into sections of about `_SECTION_BYTES`."""
    held: list[bytes] = []
    size, first = 0, 1
    for number, line in enumerate(lines(file.path), start=1):
        held.append(line)
        size += len(line)
        if size >= (_SECTION_BYTES if not line.strip() else 4 * _SECTION_BYTES):
            yield _RawDocument(file, b"".join(held), first)
            held, size, first = [], 0, number + 1
    if held:
        yield _RawDocument(file, b"".join(held), first)
