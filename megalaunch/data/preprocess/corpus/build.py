"""Builds the tokenizer and the token files of a corpus in a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from megalaunch.data.errors import DataError
from megalaunch.data.prepared_files import TOKENIZER, TRAIN, VALIDATION
from megalaunch.data.preprocess.chunking import Chunk
from megalaunch.data.preprocess.corpus.documents import Corpus, Document, document_names
from megalaunch.data.preprocess.encode_chunk import Encoded, EncodedKey
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.pipeline import Job, TextToTokens
from megalaunch.data.preprocess.settings import OnBadRecord
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader
from megalaunch.data.tokenizer.tokenizer import Tokenizer, copy_tokenizer, train_tokenizer
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

_BYTES_A_WORKER = 8 << 20  # smaller corpora take less time to encode than a worker takes to start


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
    path = directory / TOKENIZER
    loaded = _tokenizer(path, corpus, data, tokenizer, report)
    settings = replace(
        corpus.settings(path),
        workers=max(1, min(len(os.sched_getaffinity(0)), corpus.size() // _BYTES_A_WORKER)),
        append_eod=data.append_eod,
        add_special_tokens=data.add_special_tokens,
        on_bad_record=OnBadRecord(data.on_bad_record),
    )
    job = Job(
        inputs=corpus.inputs,
        chunks=corpus.chunks,
        output_prefix=directory / TRAIN,
        finals=(directory / TRAIN, directory / VALIDATION),
        partition=partial(_split_off_validation, corpus.inputs, data.validation_every),
    )
    loader = TokenizerLoader.of(loaded)
    with TextToTokens.start(job, settings, loader, lambda progress: None, lambda text: report(f"note: {text}")) as run:
        if run.backend.note:
            report(f"note: {run.backend.note}")
        report("encoding the documents")
        run.encode()
        run.finish()
        run.output.build_indexes()
        run.publish()
    if run.state.bad:
        first = run.state.bad[0]
        error = DataError(first["cause"], file=first["file"], record=first["line"])
        report(f"note: {run.state.counts.skipped:,} records left out, the first: {error}")


def _split_off_validation(
    inputs: Sequence[Input], every: int, chunk: Chunk, encoded: Encoded, file: int, lines: int
) -> list[EncodedKey]:
    """Return the training and the validation documents of a chunk (see `pipeline.Partition`)."""
    [documents] = encoded.keys
    name, bad = document_names(chunk, inputs, file, lines), {record.number for record in encoded.bad}
    numbers = (number for number in range(encoded.records) if number not in bad)
    validation = np.array([is_validation(name(number), every) for number in numbers], np.bool_)
    return [documents.select(~validation), documents.select(validation)]


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
    report(f"training a tokenizer of {tokenizer.vocab_size:,} tokens")
    trained = train_tokenizer(
        (document.text for document in _training_documents(corpus, data)), tokenizer.vocab_size, path
    )
    if trained.vocab_size < tokenizer.vocab_size:
        report(f"note: the corpus is too small for {tokenizer.vocab_size:,} tokens, it gave {trained.vocab_size:,}")
    return trained


def _no_training_text(corpus: Corpus, data: DataSpec) -> DataError:
    if any(document.text for document in corpus.documents(bad_record_handler(data, []))):
        return DataError(
            f"no document is left for training: data.validation_every={data.validation_every} took all of them",
            file=data.corpus,
            fix="Set data.validation_every=0 to train on everything, or give more documents.",
        )
    return DataError("the corpus is empty: its files hold no text", file=data.corpus, fix="Correct data.corpus.")
