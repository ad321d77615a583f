"""How well a model predicts texts: loss, perplexity and bits per byte of token files, and of text as it is."""

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
from megalaunch.data.preprocess.corpus import find_corpus
from megalaunch.data.samples.sample import EodPolicy
from megalaunch.data.samples.validation_dataset import FiniteDataset, ValidationSamples
from megalaunch.engine.inference.load_model import LanguageModel, ModelSource
from megalaunch.engine.train.dataloader import microbatch
from megalaunch.engine.train.linear_cross_entropy import LinearCrossEntropy
from megalaunch.engine.train.loss import IGNORE_INDEX

HEAD_CHUNKS = 16  # of the head and its loss: few logits at a time


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


Summed = Callable[[FiniteDataset], tuple[float, int]]
"""The sum of the token losses (nats) of all rows, and of how many tokens."""


def evaluate_perplexity(
    model: LanguageModel, data: list[str], sequence_length: int | None, batch_size: int, json_key: str
) -> Iterator[Score]:
    """One of each data set: the prefix of token files, or a file, folder or glob of texts (see data.corpus).

    Computed as a run's validation loss is: rows of `sequence_length` (None: the run's) that overlap by one token, over
    all documents joined as they stand, so that every token but the first is predicted once. Borders of documents mean
    what they mean to the run. Raises DataError; ValueError for a length that the model is not made for.
    """
    length = eval_sequence_length(model, sequence_length)
    return scores_by(partial(_sum_loss, model, batch_size), model, data, length, json_key)


def eval_sequence_length(source: ModelSource, asked: int | None) -> int:
    """The given length, or the run's; raises ValueError for one that the model is not made for."""
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
    """As `scores`, by anything that sums the losses of the source's model; `moves` hears of each document that is read.

    Raises DataError.
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
    """The texts as token files, each with the source's special tokens and the end-of-document token behind it."""
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
        prefix, length, vocab_size=source.spec.model.vocab_size, borders=_document_boundaries(source)
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
        batch = microbatch([rows[index] for index in range(start, stop)]).map(lambda part: part.to(decoder.device))
        states = decoder(batch.tokens, batch.positions, documents_BS=batch.documents, logits=False)
        total += float(head(states, batch.labels))
        tokens += int((batch.labels != IGNORE_INDEX).sum())
    return total, tokens


def _num_bytes(model: ModelSource, prefix: Path, moves: Callable[[], None]) -> int:
    """Bytes of text in all sequences, but of the very first token, which nothing predicts."""
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
