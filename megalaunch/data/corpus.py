"""The documents of a corpus: Python's own sources, or a user's text and jsonl files, in a stable order."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, cannot

# Tests and tables rather than code a person would read; and packages, which differ between machines.
_STANDARD_LIBRARY_LEAVES_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
_RECORD_SUFFIXES = {".jsonl", ".ndjson"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A lone text file is cut into documents after a blank line once this long, after any line once four times as long.
_SECTION_BYTES = 4096
_CORRECT_SOURCE = "Correct data.corpus, or allow reading."
_ONLY_UTF8 = "Convert it to UTF-8 (iconv -f latin1 -t utf-8 ...), or leave it out by a glob."


@dataclass(frozen=True)
class Document:
    """`name` is the same wherever the corpus lies; it decides whether the document is for validation."""

    name: str
    text: str


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus, under the name its documents carry."""

    path: Path
    name: str

    @property
    def holds_records(self) -> bool:
        """Whether each line is a JSON record rather than text."""
        return self.path.suffix in _RECORD_SUFFIXES

    def size(self) -> int:
        """Bytes in it."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise cannot("read it", self.path, error, _CORRECT_SOURCE) from error

    def sha256(self) -> str:
        """Hash of its content."""
        with open_source(self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Files of text (one document each) and jsonl (one document a line, named `file:line`).

    A corpus of one text file would be one document, which cannot be split into training and validation:
    it is cut into sections of about 4 kB, named `file:first line`, after blank lines where it has them.
    """

    files: tuple[CorpusFile, ...]
    json_key: str

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size() for file in self.files)

    def documents(self) -> Iterator[Document]:
        """All documents in order, empty ones included; reads anew on every call.

        DataError for what is no UTF-8, and for a line that is no JSON object with text under `json_key`.
        """
        alone = len(self.files) == 1
        for file in self.files:
            with open_source(file.path) as source:
                if file.holds_records:
                    yield from _records(file, source, self.json_key)
                elif alone:
                    yield from _sections(file, source)
                else:
                    yield Document(file.name, decode(source.read(), file.path))


def find_corpus(source: str, json_key: str) -> Corpus:
    """The corpus that `data.corpus` names: `python-stdlib`, a file, a folder or a glob.

    Files are sorted by their path relative to the folder, or to the part of a glob before its first
    wildcard. Hidden files and folders are left out. DataError when there is nothing.
    """
    from megalaunch.config.schema.data import STANDARD_LIBRARY  # preprocessing needs no schema, and starts fast

    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        return Corpus(_below(root, _STANDARD_LIBRARY_LEAVES_OUT, ".py"), json_key)
    found = files_of(source)
    if not found:
        fix = f"data.corpus takes a file, a folder, a glob or {STANDARD_LIBRARY}."
        raise DataError("no such corpus", file=Path(source).expanduser(), fix=fix)
    return Corpus(found, json_key)


def files_of(source: str) -> tuple[CorpusFile, ...]:
    """The files that a path or glob names, in their order, none when there is nothing of that name."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _below(path, set(), "")
        if path.is_file():
            return (CorpusFile(path, path.name),)
        if glob.has_magic(source):
            return _matching(str(path))
    except OSError as error:
        raise cannot("read it", Path(error.filename or path), error, _CORRECT_SOURCE) from error
    return ()


def open_source(path: Path) -> BufferedReader:
    """Open a file of the corpus; DataError when that fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise cannot("read it", path, error, _CORRECT_SOURCE) from error


def record_text(line: bytes, json_key: str, path: Path, number: int) -> str:
    """The text of one jsonl line; DataError naming file, line and what is wrong with it."""
    text = _value(line, json_key, path, number)
    if not isinstance(text, str):
        raise DataError(f'"{json_key}" holds {_kind(text)}, not text', file=path, record=number)
    _refuse_half_characters(text, json_key, path, number)
    return text


def record_sentences(line: bytes, json_key: str, path: Path, number: int) -> list[str]:
    """As `record_text`, for Megatron's records: the value is a text, or a list of texts (sentences)."""
    return sentences_of(_value(line, json_key, path, number), json_key, path, number)


def sentences_of(value: Any, json_key: str, path: Path, number: int) -> list[str]:
    """The sentences that a record's value stands for; DataError when it is neither a text nor a list of texts."""
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise DataError(f'"{json_key}" holds {_kind(sentence)}, not text', file=path, record=number)
        _refuse_half_characters(sentence, json_key, path, number)
    return sentences


def _value(line: bytes, json_key: str, path: Path, number: int) -> Any:
    if number == 1:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if b"\0" in line:
        column = line.index(b"\0") + 1
        raise DataError(f"a NUL byte in column {column:,}: the file is damaged", file=path, record=number)
    record = _parse(decode(line, path, number), path, number)
    if not isinstance(record, dict):
        raise DataError(f"a record is a JSON object, this is {_kind(record)}", file=path, record=number)
    if json_key not in record:
        keys = ", ".join(list(record)[:5]) or "none"
        fix = f"Its keys are {keys}: name the one with the text (data.json_key, or --json-key)."
        raise DataError(f'the record has no key "{json_key}"', file=path, record=number, fix=fix)
    return record[json_key]


def _refuse_half_characters(text: str, json_key: str, path: Path, number: int) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
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


def decode(content: bytes, path: Path, first_line: int = 1) -> str:
    """UTF-8 text; DataError naming the line, where `content` begins in line `first_line` of the file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        column = error.start - content.rfind(b"\n", 0, error.start)
        cause = f"no UTF-8 text (byte 0x{content[error.start]:02x} in column {column:,})"
        raise DataError(cause, file=path, record=line, fix=_ONLY_UTF8) from None


def _records(file: CorpusFile, source: BufferedReader, json_key: str) -> Iterator[Document]:
    for number, line in enumerate(source, start=1):
        yield Document(f"{file.name}:{number}", record_text(line, json_key, file.path, number))


def _sections(file: CorpusFile, source: BufferedReader) -> Iterator[Document]:
    lines: list[bytes] = []
    size, first = 0, 1
    for number, line in enumerate(source, start=1):
        lines.append(line)
        size += len(line)
        if size >= (_SECTION_BYTES if not line.strip() else 4 * _SECTION_BYTES):
            yield Document(f"{file.name}:{first}", decode(b"".join(lines), file.path, first))
            lines, size, first = [], 0, number + 1
    if lines:
        yield Document(f"{file.name}:{first}", decode(b"".join(lines), file.path, first))


def _below(root: Path, left_out: set[str], suffix: str) -> tuple[CorpusFile, ...]:
    def fail(error: OSError) -> None:
        raise error  # os.walk would pass over a folder that it may not list

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        # Pruned in place, so that a folder left out is not even listed.
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith("."))
        found += [CorpusFile(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    if not found:
        raise DataError(f"the folder holds no {suffix or 'readable'} files", file=root, fix="Correct data.corpus.")
    return tuple(sorted(found, key=lambda file: file.name))


def _matching(pattern: str) -> tuple[CorpusFile, ...]:
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    # Unlike Path.glob, this leaves hidden files out and lets a last ** match files.
    matches = glob.iglob(pattern, recursive=True)  # noqa: PTH207
    paths = [path for path in map(Path, matches) if path.is_file()]
    if not paths:
        raise DataError("no file matches this corpus", file=pattern, fix="Quote the glob, and look for ** and suffix.")
    return tuple(sorted((CorpusFile(path, path.relative_to(root).as_posix()) for path in paths), key=lambda f: f.name))
