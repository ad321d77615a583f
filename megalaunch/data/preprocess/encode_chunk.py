"""Encodes chunks of raw records to token ids: the work of the preprocessing workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk, Unreadable, too_long
from megalaunch.data.preprocess.encoder_backend import Encode
from megalaunch.data.preprocess.records import Record, plain_texts, read_lines, records
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.remote_file import InputPath
from megalaunch.data.tokenizer.tokenizer import SpecialTokens
from megalaunch.installation import install_command

_MAX_QUARANTINED = 1 << 20  # bytes of a bad record that are written to the quarantine
_PIECE = 1_000_000  # characters split at a time, as in Megatron


@dataclass(frozen=True)
class EncoderConfig:
    """All settings that determine the ids.

    Attributes:
        engine: the encoder backend.
        tokenizer: path of a tokenizer.json.
        vocab_size: ids must be below it.
        keys: JSON keys or columns of the texts.
        end: end-of-document token appended to each document; None: none.
        dtype: dtype of the stored tokens.
        language: language for splitting sentences; None: not split.
        record_bytes: maximum size of a record.
        around: special tokens added to every sequence.
        sentence_lists: whether a value may be a list of texts.
    """

    engine: EngineChoice
    tokenizer: Path
    vocab_size: int
    keys: tuple[str, ...]
    end: int | None
    dtype: np.dtype[Any]
    language: str | None
    record_bytes: int
    around: SpecialTokens = SpecialTokens()
    sentence_lists: bool = True


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out.

    Attributes:
        path: its file.
        number: its index in the chunk.
        is_text: whether it is a text of several lines; any other record is one line (or row).
        text_line: of a text, the line of the error in its file, from 1; None if it has none.
        cause: the error.
        fix: suggestion for the user.
        content: its first bytes.
    """

    path: InputPath
    number: int
    is_text: bool
    text_line: int | None
    cause: str
    fix: str
    content: bytes

    def line(self, lines_before: int) -> int | None:
        """Return its line in the file, from 1; `lines_before` is the number of lines before the chunk."""
        return self.text_line if self.is_text else lines_before + self.number + 1


@dataclass(frozen=True)
class EncodedKey:
    """The documents of one key: token ids, tokens of each sequence, sequences of each document (both int32)."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int32]

    def select(self, selected: NDArray[np.bool_]) -> EncodedKey:
        """Return the documents for which `selected` [documents] is true."""
        if selected.all():
            return self
        sequences = np.repeat(selected, self.documents)
        tokens = self.tokens[np.repeat(sequences, self.lengths)]
        return EncodedKey(tokens, self.lengths[sequences], self.documents[selected])


@dataclass
class Encoded:
    """The documents of one chunk for each key, and its bad records; records = written + len(bad).

    `lines` is the number of lines consumed. The ids have the backend's dtype, or after `cast` that of the file.
    """

    records: int = 0
    lines: int = 0
    keys: list[EncodedKey] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)

    def cast(self, dtype: np.dtype[Any]) -> None:
        """Cast the ids, which are within the vocabulary, to the dtype of the file."""
        self.keys = [replace(key, tokens=key.tokens.astype(dtype, copy=False)) for key in self.keys]


class ChunkEncoder:
    """Encodes chunks to documents as Megatron's preprocessing does.

    Every sentence gets the special tokens around it; a sentence without tokens is dropped. The end-of-document token,
    if any, is appended to the last sentence of a document that has tokens. A record that is bad under one key is left
    out under all keys, so that the files remain aligned.
    """

    def __init__(self, config: EncoderConfig, load: Callable[[EngineChoice, str], Encode]) -> None:
        self._config = config
        self._encode = load(config.engine, config.tokenizer.read_bytes().decode())
        self._split = None if config.language is None else make_splitter(config.language)
        self._end = None if config.end is None else np.array([config.end], np.uint32)
        around = config.around
        self._before, self._after = (np.array(ids, np.uint32) for ids in (around.before, around.after))

    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk. DataError only if its file cannot be read any more."""
        result = Encoded()
        if isinstance(chunk.body, Unreadable):
            result.records = result.lines = chunk.body.lines
            result.bad.append(BadRecord(chunk.path, 0, False, None, chunk.body.cause, chunk.body.fix, b""))
            result.keys = [self._join([]) for _ in self._config.keys]
            return result
        chunk = read_lines(chunk)
        return self._encode_batch(chunk) or self._encode_records(chunk)

    def _encode_batch(self, chunk: Chunk) -> Encoded | None:
        """Encode all records together; None if any of them needs individual treatment."""
        texts = plain_texts(chunk, self._config.keys, self._config.record_bytes) if self._split is None else None
        if texts is None:
            return None
        keys, around = [], bool(self._config.around)
        for column in texts:
            key = self._join([[ids] if ids.size or around else [] for ids in map(self._encode, column)])
            if key.tokens.max(initial=0) >= self._config.vocab_size:
                return None
            keys.append(key)
        return Encoded(len(texts[0]), len(texts[0]), keys)

    def _encode_records(self, chunk: Chunk) -> Encoded:
        """Encode each record separately and collect the bad ones."""
        result = Encoded()
        documents: list[list[list[NDArray[Any]]]] = []
        for record in records(chunk, self._config.keys, self._config.sentence_lists):
            try:
                self._check_size(record)
                documents.append([self._encode_document(sentences) for sentences in record.sentences()])
            except DataError as error:
                where = (record.path, result.records, record.is_text, error.record)
                result.bad.append(BadRecord(*where, error.cause, error.fix, record.content()[:_MAX_QUARANTINED]))
            result.records += 1
        result.lines = result.records
        columns = ([document[k] for document in documents] for k in range(len(self._config.keys)))
        result.keys = [*map(self._join, columns)]
        return result

    def _check_size(self, record: Record) -> None:
        """Raise DataError for a record over the limit; a line's end counts, as in chunking.py."""
        if isinstance(record.source, bytes) and len(record.source) >= self._config.record_bytes:
            long = too_long(len(record.source) + 1, self._config.record_bytes)
            raise DataError(long.cause, fix=long.fix)

    def _encode_document(self, sentences: Sequence[str]) -> list[NDArray[Any]]:
        if self._split is not None:
            sentences = [part for sentence in sentences for part in self._split(sentence)]
        around = bool(self._config.around)
        sequences = [ids for ids in map(self._encode, sentences) if ids.size or around]
        for ids in sequences:
            if (largest := ids.max(initial=0)) >= self._config.vocab_size:
                raise DataError(f"id {largest} is beyond the vocabulary of {self._config.vocab_size:,}")
        return sequences

    def _join(self, documents: list[list[NDArray[Any]]]) -> EncodedKey:
        """Concatenate one key's documents; the ids keep the backend's dtype."""
        parts: list[NDArray[Any]] = []
        lengths: list[int] = []
        added = self._before.size + self._after.size
        for document in documents:
            parts += document if not added else [part for ids in document for part in (self._before, ids, self._after)]
            lengths += [ids.size + added for ids in document]
            if document and self._end is not None:
                parts.append(self._end)
                lengths[-1] += 1
        none = [np.empty(0, self._config.dtype)]
        tokens = np.concatenate(parts or none)
        return EncodedKey(tokens, np.array(lengths, np.int32), np.array(list(map(len, documents)), np.int32))


def make_splitter(language: str) -> Callable[[str], list[str]]:
    """Return a function that splits a text into its sentences.

    The model is read from NLTK's `punkt_tab` tables (plain text; the older pickled models are never read).

    Raises:
        DataError: the package nltk or the model is missing.
    """
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError:
        raise DataError(
            "splitting sentences needs the package nltk", fix=f"{install_command('nltk')} brings it."
        ) from None
    try:
        punkt = PunktTokenizer(language)
    except LookupError:
        raise DataError(
            f"NLTK has no Punkt tables for {language}",
            fix="Put punkt_tab into a folder that the variable NLTK_DATA names (python -m nltk.downloader punkt_tab).",
        ) from None

    def split(text: str) -> list[str]:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [sentence for piece in pieces for sentence in punkt.tokenize(piece)]

    return split
