"""The part of preprocessing that worker processes do: raw records in, token ids out."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.corpus import decode, record_sentences
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class RawRecord:
    """One document as it stands in its file: a line of jsonl, or a whole text file (`line` None)."""

    path: Path
    line: int | None
    content: bytes


@dataclass(frozen=True)
class EncodedRecord:
    """The sequences of one document, none for an empty one; or why it could not be encoded."""

    sequences: list[NDArray[np.int32]]
    error: DataError | None = None


class Encoder:
    """Turns records into sequences as Megatron's preprocessing does.

    Empty sentences are dropped; `end` (the end-of-document token, or None) is appended to the last
    sentence of a document that has any token.
    """

    def __init__(self, tokenizer: Tokenizer, json_key: str, end: int | None) -> None:
        self.tokenizer, self.json_key, self.end = tokenizer, json_key, end

    def encode(self, records: list[RawRecord]) -> list[EncodedRecord]:
        """One result a record, in order."""
        return [self._encode_one(record) for record in records]

    def _encode_one(self, record: RawRecord) -> EncodedRecord:
        try:
            if record.line is None:
                sentences = [decode(record.content, record.path)]
            else:
                sentences = record_sentences(record.content, self.json_key, record.path, record.line)
        except DataError as error:
            return EncodedRecord([], error)
        # One text a call stays on one thread: the workers are the parallelism, as many as were asked for.
        encoded = [self.tokenizer.encode_batch([sentence])[0] for sentence in sentences]
        sequences = [sequence for sequence in encoded if sequence]
        if sequences and self.end is not None:
            sequences[-1].append(self.end)
        return EncodedRecord([np.array(sequence, dtype=np.int32) for sequence in sequences])


_encoder: Encoder | None = None  # one a worker process, set by start_worker


def start_worker(tokenizer: Path, json_key: str, end: int | None) -> None:
    """Make this process a worker: load the tokenizer, leave Ctrl-C to the parent, die with the parent."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _encoder = Encoder(load_tokenizer(tokenizer), json_key, end)


def encode_in_worker(records: list[RawRecord]) -> list[EncodedRecord]:
    """`Encoder.encode` of the encoder that `start_worker` made in this process."""
    assert _encoder is not None, "start_worker runs first in every worker"
    return _encoder.encode(records)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only worker processes run this"
    connection.wait([parent.sentinel])
    os._exit(1)
