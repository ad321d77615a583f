"""Builds the token files of conversations and the files with their loss masks (which tokens belong to answers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.prepared_files import TOKENIZER, TRAIN, VALIDATION, loss_mask_prefix
from megalaunch.data.preprocess.chat.conversation import (
    KEYS,
    Conversation,
    conversation,
    drop_nulls,
    parse_conversation,
)
from megalaunch.data.preprocess.chat.encode import encode_with_mask, is_within
from megalaunch.data.preprocess.chat.jinja_process import Rendering, TemplateProcess
from megalaunch.data.preprocess.chat.template import TEMPLATES, render, render_jinja
from megalaunch.data.preprocess.corpus.build import bad_record_handler, is_validation, report_bad_records
from megalaunch.data.preprocess.corpus.documents import Corpus
from megalaunch.data.preprocess.inputs import TABLES, CorpusFile, describe
from megalaunch.data.preprocess.readers import lines, table_columns, table_rows
from megalaunch.data.preprocess.records import find_lone_surrogate
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.remote_file import InputPath
from megalaunch.data.tokenizer.folder import chat_template, companion_files, named_tokens, read_json
from megalaunch.data.tokenizer.tokenizer import Tokenizer, copy_tokenizer
from megalaunch.schema.data import OWN_TEMPLATE, DataSpec

_CONVERSATIONS_AT_ONCE = 512
_ROWS_BYTES = 1 << 22


@dataclass(frozen=True)
class _ConversationText:
    """One parsed conversation with its file, record number and name."""

    path: InputPath
    number: int
    name: str
    conversation: Conversation


@dataclass(frozen=True)
class _ConversationEncoder:
    """Renders conversations to text and encodes it.

    Attributes:
        tokenizer: encodes the rendered text; matches `marks` in it as special tokens.
        marks: tokens of the template that no message may contain, each with its description.
        write: renders a conversation.
    """

    tokenizer: Tokenizer
    marks: Mapping[str, str]
    write: Callable[[Conversation], Rendering]


def build_chat(
    directory: Path, corpus: Corpus, data: DataSpec, tokenizer_path: Path, report: Callable[[str], None]
) -> None:
    """Write tokenizer.json, and tokens and loss masks of the training and the validation conversations.

    Raises:
        DataError: there is nothing to train on, or a record is no conversation and `data.on_bad_record` is not skip.
    """
    tokenizer = copy_tokenizer(tokenizer_path, directory / TOKENIZER)
    bad: list[DataError] = []
    left_out = bad_record_handler(data, bad)

    def reject(error: DataError) -> None:
        if left_out is None:
            raise error
        left_out(error)

    with ExitStack() as stack:
        encoder = _make_encoder(tokenizer, data.chat_template, tokenizer_path, stack)
        report("encoding the conversations")
        writers = {side: stack.enter_context(_ChatWriter(directory / side, tokenizer)) for side in (TRAIN, VALIDATION)}
        for batch in _batches(_encode_batch(_conversations(corpus, reject), encoder, reject)):
            encoded = encoder.tokenizer.encode_spans([rendering.text for _, rendering in batch])
            for (parsed, rendering), (ids, offsets) in zip(batch, encoded, strict=True):
                side = VALIDATION if is_validation(parsed.name, data.validation_every) else TRAIN
                writers[side].add(ids, is_within(offsets, rendering.spans))
        if writers[TRAIN].conversations == 0:
            raise DataError("it holds no conversation to train on", file=data.sft_data, fix="Correct data.sft_data.")
    report_bad_records(bad, report)


class _ChatWriter:
    """Writes tokens and loss masks of the training or the validation conversations."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self._stack = ExitStack()
        self._tokens = TokenWriter(prefix, token_type(tokenizer.vocab_size))
        self._answers = TokenWriter(loss_mask_prefix(prefix), np.dtype("u1"))
        self.conversations = 0

    def __enter__(self) -> _ChatWriter:
        with ExitStack() as stack:
            stack.enter_context(self._answers)
            stack.enter_context(self._tokens)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> bool | None:
        return self._stack.__exit__(*raised)  # type: ignore[arg-type]  # the three values of a `with`

    def add(self, ids: Sequence[int], answers: NDArray[np.bool_]) -> None:
        """Write one conversation."""
        self._tokens.add_sequence(ids)
        self._answers.add_sequence(answers.astype(np.int64))
        self._tokens.end_document()
        self._answers.end_document()
        self.conversations += 1


def _make_encoder(tokenizer: Tokenizer, name: str, path: Path, stack: ExitStack) -> _ConversationEncoder:
    """Return the encoder for the chat template `name`; DataError if the tokenizer lacks a token or a template."""
    if name == OWN_TEMPLATE:
        return _worker_encoder(tokenizer, path, stack)
    template = TEMPLATES[name]
    marks = {mark: mark for mark in template.marks}
    stop = template.stop
    if stop is None:
        stop = tokenizer.token(tokenizer.require_eod(path, "Choose another data.chat_template.")) or ""
        stop = stop.removeprefix(" ")  # hides the token of a unigram model from texts (tokenizer/conversion.py)
        marks[stop] = "the end-of-document token"
    marked = encode_with_mask(tokenizer, marks)
    for mark in marks:
        if len(marked.encode(mark)) != 1:
            raise DataError(
                f"{mark} is no token of it, and data.chat_template={name} needs it",
                file=path,
                fix="Choose another data.chat_template; `plain` needs no token but the end of a document.",
            )
    end = stop
    return _ConversationEncoder(marked, marks, lambda talk: render(template, talk, end))


def _worker_encoder(tokenizer: Tokenizer, path: Path, stack: ExitStack) -> _ConversationEncoder:
    """Return the encoder for the tokenizer's own Jinja template."""
    files = companion_files(path)
    program, names = chat_template(files), named_tokens(files)
    if program is None:
        raise DataError(
            "its directory has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
            file=path,
            fix="Choose another data.chat_template.",
        )
    declared = read_json(files, "tokenizer_config.json").get("added_tokens_decoder")
    tokens = [str(one.get("content")) for one in declared.values()] if isinstance(declared, dict) else []
    marked = encode_with_mask(tokenizer, [*names.values(), *tokens])
    special = {name: name for number in sorted(marked.textless_ids) if (name := marked.token(number))}
    process = stack.enter_context(TemplateProcess(program))
    return _ConversationEncoder(marked, special, lambda talk: render_jinja(process, talk, names, special))


def _encode_batch(
    conversations: Iterator[_ConversationText], encoder: _ConversationEncoder, reject: Callable[[DataError], None]
) -> Iterator[tuple[_ConversationText, Rendering]]:
    """Yield every conversation with its rendered text; reject those that cannot be rendered."""
    for parsed in conversations:
        unusable = _template_injection(parsed.conversation, encoder.marks)
        rendering = Rendering() if unusable else encoder.write(parsed.conversation)
        if (half := find_lone_surrogate(rendering.text)) is not None:
            unusable = f"a message holds half a character ({half})"
        if unusable:
            reject(DataError(unusable, file=parsed.path, record=parsed.number, fix="Remove it from the text."))
        elif rendering.error is not None:
            cause = f"the tokenizer's chat template cannot be applied: {rendering.error}"
            reject(DataError(cause, file=parsed.path, record=parsed.number))
        else:
            yield parsed, rendering


def _conversations(corpus: Corpus, reject: Callable[[DataError], None]) -> Iterator[_ConversationText]:
    """Yield every conversation in order; skip empty lines, reject invalid records."""
    for file in corpus.files:
        table = describe(file.path, Format.AUTO).format in TABLES
        for number, read in _rows(file) if table else _lines(file):
            try:
                found = read()
            except DataError as error:
                reject(error)
                continue
            yield _ConversationText(file.path, number, f"{file.name}:{number}", found)


def _lines(file: CorpusFile) -> Iterator[tuple[int, Callable[[], Conversation]]]:
    for number, line in enumerate(lines(file.path), start=1):
        if line.strip():
            yield number, partial(parse_conversation, line, file.path, number)


def _rows(file: CorpusFile) -> Iterator[tuple[int, Callable[[], Conversation]]]:
    entry = describe(file.path, Format.AUTO)
    keys = [key for key in table_columns(entry) if key in KEYS]
    number = 0
    for part in table_rows(entry, keys, _ROWS_BYTES) if keys else ():
        for values in part.values:
            number += 1
            record = drop_nulls(dict(zip(keys, values, strict=True)))
            yield number, partial(conversation, record, file.path, number)


def _template_injection(parsed: Conversation, marks: Mapping[str, str]) -> str | None:
    """Return the error for a message that contains a token of the template; None if there is none."""
    texts = [*_texts([message.given for message in parsed.messages]), *_texts(parsed.tools)]
    injected = next((mark for mark in marks for text in texts if mark in text), None)
    return None if injected is None else f"a message holds {marks[injected]}, which would begin or end a turn"


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _batches(
    items: Iterator[tuple[_ConversationText, Rendering]],
) -> Iterator[list[tuple[_ConversationText, Rendering]]]:
    batch: list[tuple[_ConversationText, Rendering]] = []
    for item in items:
        batch.append(item)
        if len(batch) == _CONVERSATIONS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
