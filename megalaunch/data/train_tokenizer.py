"""Selects the text for training a tokenizer: the valid records of any inputs, up to a size."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalaunch.data.errors import DataError, open_output
from megalaunch.data.preprocess.chunking import Position, Unreadable, chunks
from megalaunch.data.preprocess.inputs import Input, check_unchanged, find_inputs
from megalaunch.data.preprocess.records import valid_texts
from megalaunch.data.preprocess.settings import Format, Settings
from megalaunch.data.tokenizer.tokenizer import Tokenizer, train_tokenizer


def train_tokenizer_on(
    inputs: Sequence[str], keys: tuple[str, ...], vocab_size: int, output: Path, megabytes: float
) -> tuple[Tokenizer, int]:
    """Train a tokenizer on at most `megabytes` of the inputs' text and save it atomically.

    Invalid records are skipped.

    Returns:
        The tokenizer and the number of characters it was trained on.

    Raises:
        DataError: the inputs hold no text, cannot be read, or changed meanwhile.
    """
    found, unfinished = find_inputs(inputs, Format.AUTO), open_output(output)
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in _texts(found, keys, int(megabytes * 1e6)):
            seen += len(text)
            yield text

    try:
        trained = train_tokenizer(counted(), vocab_size, unfinished.temporary)
        check_unchanged(found)
        if not seen:
            raise DataError("the inputs hold no text to learn from", file=", ".join(inputs), fix="Give other files.")
        unfinished.sync()
        unfinished.publish()
    finally:
        unfinished.discard()
    return trained, seen


def _texts(inputs: Sequence[Input], keys: tuple[str, ...], left: int) -> Iterator[str]:
    settings = Settings(Path(), json_keys=keys)
    for chunk in chunks(inputs, settings, Position(0, 0)):
        if isinstance(chunk.body, Unreadable):
            continue
        for text in valid_texts(chunk, keys, sys.maxsize):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return
