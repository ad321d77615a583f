"""The documents of `data.corpus`, in a stable order: Python's standard library, or a user's text and table files."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import (
    Chunk,
    Position,
    Sections,
    Unreadable,
    WholeFiles,
    chunks,
    section_chunks,
)
from megalaunch.data.preprocess.inputs import TRAIN, CorpusFile, Input, describe, list_files, select_files, walk_files
from megalaunch.data.preprocess.records import records
from megalaunch.data.preprocess.settings import Fixes, Format, Settings

# Tests and data tables, and site-packages, which differ between machines.
_STANDARD_LIBRARY_LEAVES_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
_BEGINNING = Position(0, 0)
_MAX_RECORD_BYTES = 2**31 - 1  # token files store the length of a sequence as int32
_FIXES = Fixes(
    no_eod="Set data.append_eod=false.",
    no_special_tokens="; data.add_special_tokens=false leaves that out",
    bad_record="To leave such records out: data.on_bad_record=skip.",
    disk_full="Free space there, or choose another folder with data.cache_directory=PATH.",
    no_workers="Free memory, then start again.",
    worker_died="Free memory, then start again.",
)


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

    @cached_property
    def inputs(self) -> list[Input]:
        """Files with format and compression. DataError if one is missing, or is a compressed table."""
        return [describe(file.path, Format.AUTO, file.name) for file in self.files]

    def settings(self, tokenizer: Path) -> Settings:
        """Return the settings with which the pipeline reads this corpus and encodes it with `tokenizer`."""
        return Settings(
            tokenizer,
            json_keys=(self.json_key,),
            record_bytes=_MAX_RECORD_BYTES,
            sentence_lists=False,
            checkpoint_seconds=float("inf"),
            fixes=_FIXES,
        )

    def chunks(self, start: Position = _BEGINNING) -> Iterator[Chunk]:
        """Yield all chunks from `start`. Raises DataError for a file that cannot be read, or is corrupt."""
        settings = self.settings(Path())
        if len(self.inputs) == 1 and self.inputs[0].format is Format.TEXT:
            yield from section_chunks(self.inputs[0], settings.chunk_bytes)
            return
        for chunk in chunks(self.inputs, settings, start):
            if isinstance(chunk.body, Unreadable):
                raise DataError(chunk.body.cause, file=chunk.path, fix=chunk.body.fix)
            yield chunk

    def documents(self, bad: Callable[[DataError], None] | None = None) -> Iterator[Document]:
        """Yield all documents in order, including empty ones; reads the files again on every call.

        Args:
            bad: called with the error of each invalid record, which is skipped; None: the error is raised.

        Raises:
            DataError: text that is not UTF-8, a line that is not a JSON object with text under `json_key`, or a
                compressed file that is truncated or corrupt.
        """
        position, lines = _BEGINNING, 0
        for chunk in self.chunks():
            names = document_names(chunk, self.inputs, position.file, lines)
            number = -1
            for number, record in enumerate(records(chunk, (self.json_key,), lists=False)):
                try:
                    [[text]] = record.sentences()
                except DataError as error:
                    line = error.record if record.is_text else lines + number + 1
                    located = DataError(error.cause, file=record.path, record=line, fix=error.fix)
                    if bad is None:
                        raise located from None
                    bad(located)
                else:
                    yield Document(names(number), text)
            lines = lines + number + 1 if chunk.end.file == position.file else 0
            position = chunk.end


def document_names(chunk: Chunk, inputs: Sequence[Input], file: int, lines: int) -> Callable[[int], str]:
    """Return the function from the index of a record in the chunk to its document's name.

    Args:
        chunk: the chunk.
        inputs: all inputs.
        file: index of the input that the chunk starts in.
        lines: lines of that input before the chunk.
    """
    body = chunk.body
    if isinstance(body, WholeFiles):
        return lambda number: inputs[file + number].name
    name = inputs[file].name
    if isinstance(body, Sections):
        return lambda number: f"{name}:{body.first_lines[number]}"
    return lambda number: f"{name}:{lines + number + 1}"


def find_corpus(source: str, json_key: str, split: str | None = TRAIN) -> Corpus:
    """Return the corpus that `data.corpus` names: `python-stdlib`, a file, a directory or a glob.

    Files are sorted by their path relative to the directory, or to the part of a glob before its first wildcard.
    Hidden files and directories are left out.

    Args:
        source: value of `data.corpus`, or of `evaluate --data`.
        json_key: key or column of the text.
        split: split of a dataset directory (source_files.py) to read; None: several splits are an error.

    Raises:
        DataError: nothing matches.
    """
    from megalaunch.schema.data import STANDARD_LIBRARY  # here, so that preprocessing does not import the schema

    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        return Corpus(walk_files(root, _STANDARD_LIBRARY_LEAVES_OUT, ".py"), json_key)
    found = list_files(source)
    if not found:
        fix = f"A corpus is a file, a folder, a glob or {STANDARD_LIBRARY}."
        raise DataError("no such corpus", file=Path(source).expanduser(), fix=fix)
    folder = Path(source).expanduser()
    if folder.is_dir():
        selected = select_files(folder, found, split)
        return Corpus(selected.files, json_key, selected.notes)
    return Corpus(found, json_key)
