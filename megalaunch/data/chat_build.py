"""Fills a folder with the tokens of conversations, and beside them which of the tokens are answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalaunch.config.schema.data import DataSpec
from megalaunch.data.chat_text import TEMPLATES, Piece, conversation, pieces_of
from megalaunch.data.corpus import Corpus
from megalaunch.data.corpus_build import TOKENIZER, TRAIN, VALIDATION, is_validation, on_bad, tell_of
from megalaunch.data.errors import DataError
from megalaunch.data.inputs import lines
from megalaunch.data.token_writer import TokenWriter, token_type
from megalaunch.data.tokenizer import Tokenizer, load_tokenizer

_ANSWERS = "_answers"
_CONVERSATIONS_AT_ONCE = 512


def answers_prefix(prefix: Path) -> Path:
    """The files beside `prefix` that hold 1 for each token of an answer, else 0."""
    return prefix.with_name(prefix.name + _ANSWERS)


@dataclass(frozen=True)
class _Turns:
    """One conversation: where it stands, and its pieces."""

    path: Path
    number: int
    name: str
    pieces: list[Piece]


def build_chat(
    directory: Path, corpus: Corpus, data: DataSpec, tokenizer_path: Path, report: Callable[[str], None]
) -> None:
    """Write tokenizer.json and the files of both sides. DataError for a line that is no conversation,
    unless `data.on_bad_record` is skip.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    (directory / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    marks, stop = _marks(tokenizer, data.chat_template, tokenizer_path)
    report("encoding the conversations")
    bad: list[DataError] = []
    left_out = on_bad(data, bad)
    with ExitStack() as stack:
        writers = {side: stack.enter_context(_ChatWriter(directory / side, tokenizer)) for side in (TRAIN, VALIDATION)}
        for batch in _batches(_conversations(corpus, data.chat_template, left_out)):
            texts = [piece.text for turns in batch for piece in turns.pieces if piece.text is not None]
            encoded = iter(tokenizer.encode_batch(texts))
            for turns in batch:
                parts = [[stop] if piece.text is None else next(encoded) for piece in turns.pieces]
                if (forged := _forged(turns, parts, marks)) is not None:
                    if left_out is None:
                        raise forged
                    left_out(forged)
                    continue
                side = VALIDATION if is_validation(turns.name, data.validation_every) else TRAIN
                writers[side].add(turns.pieces, parts)
        if writers[TRAIN].conversations == 0:
            raise DataError("it holds no conversation to train on", file=data.chat, fix="Correct data.chat.")
    tell_of(bad, report)


class _ChatWriter:
    """Writes the conversations of one side: their tokens, and which of them are answers."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self._stack = ExitStack()
        self._tokens = TokenWriter(prefix, token_type(tokenizer.vocab_size))
        self._answers = TokenWriter(answers_prefix(prefix), np.dtype("u1"))
        self.conversations = 0

    def __enter__(self) -> _ChatWriter:
        with ExitStack() as stack:
            stack.enter_context(self._answers)
            stack.enter_context(self._tokens)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> bool | None:
        return self._stack.__exit__(*raised)  # type: ignore[arg-type]  # the three values of a `with`

    def add(self, pieces: list[Piece], parts: list[list[int]]) -> None:
        """One conversation, piece by piece."""
        self._tokens.add_sequence([token for part in parts for token in part])
        flags = [piece.answer for piece, part in zip(pieces, parts, strict=True) for _ in part]
        self._answers.add_sequence(np.array(flags, np.int64))
        self._tokens.end_document()
        self._answers.end_document()
        self.conversations += 1


def _marks(tokenizer: Tokenizer, name: str, path: Path) -> tuple[Mapping[int, str], int]:
    """The template's marks by id, and the id that ends a turn; DataError when the tokenizer lacks one."""
    template, ids = TEMPLATES[name], {}
    for mark in template.marks:
        tokens = tokenizer.encode(mark)
        if len(tokens) != 1:
            raise DataError(
                f"{mark} is no token of it, and data.chat_template={name} needs it",
                file=path,
                fix="Choose another data.chat_template; `plain` needs no token but the end of a document.",
            )
        ids[tokens[0]] = mark
    if template.stop is not None:
        return ids, tokenizer.encode(template.stop)[0]
    stop = tokenizer.require_eod(path, "Choose another data.chat_template.")
    return {**ids, stop: "the end-of-document token"}, stop


def _conversations(corpus: Corpus, template: str, left_out: Callable[[DataError], None] | None) -> Iterator[_Turns]:
    """Every conversation in order; empty lines are passed over, bad ones given to `left_out` if there is one."""
    for file in corpus.files:
        for number, line in enumerate(lines(file.path), start=1):
            if not line.strip():
                continue
            try:
                messages = conversation(line, file.path, number)
            except DataError as error:
                if left_out is None:
                    raise
                left_out(error)
                continue
            yield _Turns(file.path, number, f"{file.name}:{number}", pieces_of(messages, TEMPLATES[template]))


def _forged(turns: _Turns, parts: list[list[int]], marks: Mapping[int, str]) -> DataError | None:
    """What is wrong with a conversation of which a message holds a mark of the template."""
    for piece, part in zip(turns.pieces, parts, strict=True):
        forged = next((token for token in part if token in marks), None) if piece.quoted else None
        if forged is not None:
            cause = f"a message holds {marks[forged]}, which would begin or end a turn"
            return DataError(cause, file=turns.path, record=turns.number, fix="Take it out of the text.")
    return None


def _batches(items: Iterator[_Turns]) -> Iterator[list[_Turns]]:
    batch: list[_Turns] = []
    for item in items:
        batch.append(item)
        if len(batch) == _CONVERSATIONS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
