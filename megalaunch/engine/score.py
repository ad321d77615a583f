"""How well a model predicts texts: loss, perplexity and bits per byte of token files, and of text as it is."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megalaunch.data.corpus import find_corpus
from megalaunch.data.errors import DataError
from megalaunch.data.indexed import IndexedTokens, bin_path, idx_path
from megalaunch.data.row import DocumentBorders
from megalaunch.data.token_writer import TokenWriter, token_type
from megalaunch.data.validation_samples import ValidationSamples
from megalaunch.engine.inference.load import LanguageModel
from megalaunch.engine.train.batches import microbatch
from megalaunch.engine.train.head_loss import HeadLoss
from megalaunch.engine.train.loss import IGNORED

_CHUNKS = 16  # of the head and its loss: few logits at a time


@dataclass(frozen=True)
class Score:
    """`loss` in nats a token, over `tokens` labels; `num_bytes` of UTF-8 are what these stand for."""

    data: str
    tokens: int
    num_bytes: int
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is more than a number can be."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None where the tokens stand for no text."""
        return self.loss * self.tokens / math.log(2) / self.num_bytes if self.num_bytes else None


def scores(
    model: LanguageModel, data: list[str], sequence_length: int | None, batch_size: int, json_key: str
) -> Iterator[Score]:
    """One of each data set: the prefix of token files, or a file, folder or glob of texts (see data.corpus).

    Computed as a run's validation loss is: rows of `sequence_length` (None: the run's) that overlap by one token, over
    all documents joined as they stand, so that every token but the first is predicted once. Borders of documents mean
    what they mean to the run. Raises DataError; ValueError for a length that the model is not made for.
    """
    length = sequence_length or model.spec.batch.sequence_length
    if length > model.spec.model.max_position_embeddings:
        longest = model.spec.model.max_position_embeddings
        raise ValueError(f"rows of {length} tokens are longer than the {longest} that the model is made for")
    for source in data:
        if idx_path(Path(source)).is_file() or bin_path(Path(source)).is_file():
            yield _score(model, source, Path(source), length, batch_size)
            continue
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "tokens"
            _write(model, source, prefix, json_key)
            yield _score(model, source, prefix, length, batch_size)


def _write(model: LanguageModel, source: str, prefix: Path, json_key: str) -> None:
    """The texts as token files, each with the tokenizer's end-of-document token behind it."""
    tokenizer = model.tokenizer
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    with TokenWriter(prefix, token_type(tokenizer.vocab_size)) as writer:
        for document in find_corpus(source, json_key).documents():
            writer.add_sequence(tokenizer.encode(document.text) + end)
            writer.end_document()


@torch.inference_mode()
def _score(model: LanguageModel, name: str, prefix: Path, length: int, batch_size: int) -> Score:
    decoder, vocabulary = model.decoder, model.decoder.config.vocab_size
    rows = ValidationSamples(prefix, length, vocab_size=vocabulary, borders=_borders(model))
    head = HeadLoss(decoder, _CHUNKS)
    total, tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        stop = min(start + batch_size, len(rows))
        batch = microbatch([rows[index] for index in range(start, stop)]).map(lambda part: part.to(decoder.device))
        states = decoder(batch.tokens, batch.positions, documents_BS=batch.documents, logits=False)
        total += float(head(states, batch.labels))
        tokens += int((batch.labels != IGNORED).sum())
    if not tokens:
        raise DataError("it holds no token to predict", file=name, fix="Name data with two tokens or more.")
    return Score(name, tokens, _num_bytes(model, prefix), total / tokens)


def _num_bytes(model: LanguageModel, prefix: Path) -> int:
    """Bytes of text in all sequences, but of the very first token, which nothing predicts."""
    file = IndexedTokens(prefix)
    texts = (model.tokenizer.decode(file.tokens(number).tolist()) for number in range(file.num_sequences))
    first = model.tokenizer.decode(file.stream[:1].tolist())
    return sum(len(text.encode()) for text in texts) - len(first.encode())


def _borders(model: LanguageModel) -> DocumentBorders | None:
    data, eod = model.spec.data, model.tokenizer.eod_id
    if eod is None or not (data.reset_positions or data.reset_attention or data.mask_eod_loss):
        return None
    return DocumentBorders(eod, data.reset_positions, data.reset_attention, data.mask_eod_loss)
