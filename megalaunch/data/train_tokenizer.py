"""Selects the text for training a tokenizer: the valid records of any inputs, up to a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, open_output
from megalaunch.data.preprocess.chunking import Chunk, Position, Unreadable, chunks
from megalaunch.data.preprocess.inputs import Input, check_unchanged, find_inputs
from megalaunch.data.preprocess.records import records
from megalaunch.data.preprocess.settings import Format, Settings
from megalaunch.data.preprocess.state import none_usable, records_left_out
from megalaunch.data.remote_file import InputPath
from megalaunch.data.tokenizer.tokenizer import Tokenizer, train_tokenizer


def train_tokenizer_on(
    inputs: Sequence[str], keys: tuple[str, ...], vocab_size: int, output: Path, megabytes: float
) -> tuple[Tokenizer, TrainingText]:
    """Train a tokenizer on at most `megabytes` of the inputs' text and save it atomically.

    Invalid records are left out and counted.

    Returns:
        The tokenizer and the text it was trained on.

    Raises:
        DataError: the inputs hold no text, cannot be read, are damaged, or changed meanwhile.
    """
    found, unfinished = find_inputs(inputs, Format.AUTO), open_output(output)
    text = TrainingText(found, keys)
    try:
        trained = train_tokenizer(text.read(int(megabytes * 1e6)), vocab_size, unfinished.temporary)
        check_unchanged(found)
        text.check(", ".join(inputs))
        unfinished.sync()
        unfinished.publish()
    finally:
        unfinished.discard()
    return trained, text


class TrainingText:
    """The texts of the valid records of some inputs.

    Attributes:
        characters: number of characters read.
    """

    def __init__(self, inputs: Sequence[Input], keys: tuple[str, ...]) -> None:
        self._inputs, self._keys = inputs, keys
        self.characters = 0
        self._records = self._left_out = 0
        self._first: list[dict[str, Any]] = []  # the first record left out, if any
        self._fix = ""

    def read(self, characters: int) -> Iterator[str]:
        """Yield the texts, up to a total of `characters`. DataError if a file is damaged, as its rest is lost."""
        settings = Settings(Path(), json_keys=self._keys)
        file, lines = 0, 0
        for chunk in chunks(self._inputs, settings, Position(0, 0)):
            before = self._records
            for text in self._texts(chunk, lines):
                yield text[: characters - self.characters]
                self.characters = min(self.characters + len(text), characters)
                if self.characters == characters:
                    return
            lines = lines + self._records - before if chunk.end.file == file else 0
            file = chunk.end.file

    def left_out(self) -> str | None:
        """Return the number of the records left out, and the first; None if there are none."""
        return records_left_out(self._left_out, self._records, self._first) if self._left_out else None

    def check(self, sources: str) -> None:
        """Raise DataError if the inputs, which are named `sources`, held no text."""
        if self._left_out and self._left_out == self._records:
            raise none_usable(self._left_out, sources, self._first, self._fix)
        if not self.characters:
            raise DataError("the inputs hold no text to learn from", file=sources, fix="Give other files.")

    def _texts(self, chunk: Chunk, lines: int) -> Iterator[str]:
        """Yield the texts of a chunk, which has `lines` lines of its file before it."""
        body = chunk.body
        if isinstance(body, Unreadable):
            if body.damaged:
                raise DataError(body.cause, file=chunk.path, record=lines + 1, fix=body.fix)
            self._records += body.lines
            self._leave_out(chunk.path, lines + 1, body.cause, "Give shorter records.")
            return
        for number, record in enumerate(records(chunk, self._keys)):
            self._records += 1
            try:
                found = [text for sentences in record.sentences() for text in sentences]
            except DataError as error:
                line = error.record if record.is_text else lines + number + 1
                self._leave_out(record.path, line, error.cause, error.fix)
                continue
            yield from found

    def _leave_out(self, path: InputPath, line: int | None, cause: str, fix: str) -> None:
        self._left_out += 1
        if not self._first:
            self._first, self._fix = [{"file": str(path), "line": line, "cause": cause}], fix
