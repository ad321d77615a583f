"""Evaluate a model on token files or raw text: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.indexed_dataset.dataset import IndexedTokens, bin_path, idx_path
from megalaunch.data.preprocess.corpus.documents import find_corpus
from megalaunch.data.samples.sample import EodPolicy
from megalaunch.data.samples.validation_dataset import FiniteDataset, ValidationSamples
from megalaunch.engine.inference.load_model import LanguageModel, ModelSource
from megalaunch.engine.train.dataloader import collate
from megalaunch.engine.train.loss import IGNORE_INDEX, LinearCrossEntropy

HEAD_CHUNKS = 16  # chunks of the linear cross-entropy, to hold few logits at a time


@dataclass(frozen=True)
class Score:
    """Result of one data set: mean `loss` in nats per token over `tokens` labels, which are `num_bytes` of UTF-8."""

    data: str
    tokens: int
    num_bytes: int
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text; None if the tokens decode to no text."""
        return self.loss * self.tokens / math.log(2) / self.num_bytes if self.num_bytes else None


Summed = Callable[[FiniteDataset], tuple[float, int]]
"""Rows -> (sum of their token losses in nats, number of tokens)."""


def evaluate_perplexity(
    model: LanguageModel, data: list[str], sequence_length: int | None, batch_size: int, json_key: str
) -> Iterator[Score]:
    """Yield the score of each data set.

    Computed like a run's validation loss: all documents are concatenated in order and cut into rows that overlap by one
    token, so that every token but the first is predicted once. Document boundaries affect position ids, attention mask
    and loss mask as in the training run.

    Args:
        model: The model.
        data: Data sets: a prefix of token files, or a file, folder or glob of texts (`find_corpus`).
        sequence_length: Tokens of a row; None: as in the training run.
        batch_size: Rows of a forward pass.
        json_key: Key of the text in JSON lines.

    Raises:
        DataError: A data set cannot be read or has no token to predict.
        ValueError: `sequence_length` exceeds the model's maximum.
    """
    length = eval_sequence_length(model, sequence_length)
    return scores_by(partial(_sum_loss, model, batch_size), model, data, length, json_key)


def eval_sequence_length(source: ModelSource, asked: int | None) -> int:
    """Return the given sequence length, or the run's; raises ValueError if it exceeds the model's maximum."""
    length, longest = asked or source.spec.batch.sequence_length, source.spec.model.max_position_embeddings
    if length > longest:
        raise ValueError(f"rows of {length} tokens are longer than the {longest} that the model is made for")
    return length


def scores_by(
    summed: Summed,
    source: ModelSource,
    data: Sequence[str],
    length: int,
    json_key: str,
    moves: Callable[[], None] = lambda: None,
) -> Iterator[Score]:
    """Yield the score of each data set, as `evaluate_perplexity`, with any function that sums a model's losses.

    Args:
        summed: Sums the losses of the source's model over rows.
        source: Spec and tokenizer of the model.
        data: Data sets.
        length: Tokens of a row.
        json_key: Key of the text in JSON lines.
        moves: Called after each document that is read, to record progress.

    Raises:
        DataError: A data set cannot be read or has no token to predict.
    """
    for name in data:
        if idx_path(Path(name)).is_file() or bin_path(Path(name)).is_file():
            yield _score(summed, source, name, Path(name), length, moves)
            continue
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "tokens"
            _write(source, name, prefix, json_key, moves)
            yield _score(summed, source, name, prefix, length, moves)


def _write(model: ModelSource, source: str, prefix: Path, json_key: str, moves: Callable[[], None]) -> None:
    """Tokenize texts into token files, each with the tokenizer's special tokens and an end-of-document token."""
    tokenizer = model.tokenizer
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    with TokenWriter(prefix, token_type(tokenizer.vocab_size)) as writer:
        for document in find_corpus(source, json_key, split=None).documents():
            writer.add_sequence(model.encode(document.text) + end)
            writer.end_document()
            moves()


def _score(
    summed: Summed, source: ModelSource, name: str, prefix: Path, length: int, moves: Callable[[], None]
) -> Score:
    rows = ValidationSamples(
        prefix, length, vocab_size=source.spec.model.vocab_size, eod_policy=_document_boundaries(source)
    )
    total, tokens = summed(rows) if len(rows) else (0.0, 0)
    if not tokens:
        raise DataError("it holds no token to predict", file=name, fix="Name data with two tokens or more.")
    return Score(name, tokens, _num_bytes(source, prefix, moves), total / tokens)


@torch.inference_mode()
def _sum_loss(model: LanguageModel, batch_size: int, rows: FiniteDataset) -> tuple[float, int]:
    decoder = model.decoder
    head = LinearCrossEntropy(decoder, HEAD_CHUNKS)
    total, tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        stop = min(start + batch_size, len(rows))
        batch = collate([rows[index] for index in range(start, stop)]).map(lambda part: part.to(decoder.device))
        states = decoder(batch.tokens, batch.positions, documents_BS=batch.documents, logits=False)
        total += float(head(states, batch.labels))
        tokens += int((batch.labels != IGNORE_INDEX).sum())
    return total, tokens


def _num_bytes(model: ModelSource, prefix: Path, moves: Callable[[], None]) -> int:
    """Return the bytes of text in all sequences, without the very first token, which is never predicted."""
    file = IndexedTokens(prefix)
    total = 0
    for number in range(file.num_sequences):
        total += len(model.tokenizer.decode(file.tokens(number).tolist()).encode())
        moves()
    return total - len(model.tokenizer.decode(file.stream[:1].tolist()).encode())


def _document_boundaries(model: ModelSource) -> EodPolicy | None:
    data, eod = model.spec.data, model.tokenizer.eod_id
    if eod is None or not (data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss):
        return None
    return EodPolicy(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
