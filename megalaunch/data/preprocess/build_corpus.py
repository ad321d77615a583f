"""Builds the tokenizer and the token files of a corpus in a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.config.schema.data import DataSpec
from megalaunch.config.schema.tokenizer import TokenizerSpec
from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.prepared_files import TOKENIZER, TRAIN, VALIDATION
from megalaunch.data.preprocess.corpus import Corpus, Document
from megalaunch.data.preprocess.encoder_backend import make_encoder, select_backend
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.tokenizer.tokenizer import Tokenizer, copy_tokenizer, required_special_tokens, train_tokenizer

_BATCH_CHARACTERS = 1 << 20  # characters encoded at a time: enough to keep all cores busy


def is_validation(name: str, every: int) -> bool:
    """Return whether a document is for validation: the sha256 of its name is a multiple of `every` (0: never)."""
    return every > 0 and int(hashlib.sha256(name.encode()).hexdigest(), 16) % every == 0


def build_corpus(
    directory: Path, corpus: Corpus, data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]
) -> None:
    """Write tokenizer.json, train.bin/.idx and validation.bin/.idx (which may be empty).

    A new tokenizer is trained on the training documents alone.

    Raises:
        DataError: there is no training text, or a record is bad and `data.on_bad_record` is not skip.
    """
    if not any(document.text for document in _training_documents(corpus, data)):
        raise _no_training_text(corpus, data)
    encoder = _tokenizer(directory / TOKENIZER, corpus, data, tokenizer, report)
    end = [encoder.require_eod(directory / TOKENIZER, "Set data.append_eod=false.")] if data.append_eod else []
    before, after = _special_tokens(encoder, directory / TOKENIZER, data, report)
    dtype = token_type(encoder.vocab_size)
    bad: list[DataError] = []
    batches = _batches(corpus.documents(bad_record_handler(data, bad)))
    first = next(batches)
    encode = _encode(encoder, [document.text for document in first], report)
    with TokenWriter(directory / TRAIN, dtype) as train, TokenWriter(directory / VALIDATION, dtype) as validation:
        for batch in chain([first], batches):
            encoded = encode([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                writer = validation if is_validation(document.name, data.validation_every) else train
                # As in Megatron's files, a document without tokens has no sequence and no end-of-document token.
                if len(tokens) or before or after:
                    parts = (before, tokens, after, end)
                    writer.add_sequence(np.concatenate([np.asarray(part, np.int64) for part in parts]))
                writer.end_document()
    report_bad_records(bad, report)


def _special_tokens(
    tokenizer: Tokenizer, path: Path, data: DataSpec, report: Callable[[str], None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after every document."""
    if not data.add_special_tokens:
        return (), ()
    around = required_special_tokens(tokenizer.special_tokens_around, path)
    if around:
        report(f"note: every document gets the tokenizer's own {around}; data.add_special_tokens=false leaves that out")
    return around.before, around.after


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], report: Callable[[str], None]
) -> Callable[[Sequence[str]], Iterable[Sequence[int] | NDArray[Any]]]:
    """Return the encoding function of the fastest correct backend; `texts` are the first texts, for the check."""
    engine = select_backend(EngineChoice.AUTO, tokenizer, texts)
    if engine.name is EngineChoice.TOKENIZERS:
        report("encoding the documents" + (f" ({engine.note})" if engine.note else ""))
        return tokenizer.encode_batch
    report("encoding the documents")
    return partial(map, make_encoder(EngineChoice.GIGATOKEN, tokenizer.to_json()))


def bad_record_handler(data: DataSpec, bad: list[DataError]) -> Callable[[DataError], None] | None:
    """Return the handler of bad records for `Corpus.documents`: append to `bad`, or None to raise."""
    return bad.append if data.on_bad_record == "skip" else None


def report_bad_records(bad: Sequence[DataError], report: Callable[[str], None]) -> None:
    """Report the number of records left out, if any."""
    if bad:
        report(f"note: {len(bad):,} records left out, the first: {bad[0]}")


def _training_documents(corpus: Corpus, data: DataSpec) -> Iterator[Document]:
    documents = corpus.documents(bad_record_handler(data, []))
    return (document for document in documents if not is_validation(document.name, data.validation_every))


def _tokenizer(
    path: Path, corpus: Corpus, data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]
) -> Tokenizer:
    """Copy the given tokenizer, or train one on the training documents."""
    if tokenizer.path is not None:
        return copy_tokenizer(tokenizer.path, path)
    report(f"training a tokenizer of {tokenizer.vocab_size:,}")
    trained = train_tokenizer(
        (document.text for document in _training_documents(corpus, data)), tokenizer.vocab_size, path
    )
    if trained.vocab_size < tokenizer.vocab_size:
        report(f"note: the corpus is too small for {tokenizer.vocab_size:,} tokens, it gave {trained.vocab_size:,}")
    return trained


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about `_BATCH_CHARACTERS`."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _no_training_text(corpus: Corpus, data: DataSpec) -> DataError:
    if any(document.text for document in corpus.documents(bad_record_handler(data, []))):
        return DataError(
            f"no document is left for training: data.validation_every={data.validation_every} took all of them",
            file=data.corpus,
            fix="Set data.validation_every=0 to train on everything, or give more documents.",
        )
    return DataError("the corpus is empty: its files hold no text", file=data.corpus, fix="Correct data.corpus.")
