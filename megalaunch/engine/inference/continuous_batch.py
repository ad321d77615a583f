"""Continuous batching: texts join a running batch when they arrive, and leave it when they end.

A step either reads the prompts of new texts, or generates one token of every text. Each text has its own sampling
parameters and random generator: what it writes does not depend on the others in its batch.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalaunch.engine.inference.generate import make_decode_step, next_logits, token_logprobs
from megalaunch.engine.inference.kv_cache import KVCache, join_rows
from megalaunch.engine.inference.load_model import LanguageModel
from megalaunch.engine.inference.loglikelihood import prompt_logprobs
from megalaunch.engine.inference.penalties import PenaltyState, TokenPenalties
from megalaunch.engine.inference.sampling import Sampler, Sampling
from megalaunch.engine.inference.sequence_text import (
    Completion,
    SequenceText,
    TextDelta,
    TokenLogprobs,
    name_logprobs,
)

_SPARE = 256  # tokens that a KV cache has room for when its rows change: fewer copies of it, for some memory


@dataclass(frozen=True)
class SequenceRequest:
    """One text to generate.

    Args:
        prompt: Tokens of the prompt, at least one.
        max_new_tokens: Maximum number of new tokens; 0: only the prompt is scored.
        sampling: The sampling parameters.
        sample: Index among the texts of the same prompt, for the random seed.
        penalties: Penalties and biases of tokens.
        stop: Strings that end a text and are not part of it.
        logprobs: The number of top log-probabilities per token; None: none are computed.
        score_prompt: Whether the tokens of the prompt get log-probabilities, too.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    sample: int = 0
    penalties: TokenPenalties = field(default_factory=TokenPenalties)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    score_prompt: bool = False


@dataclass(frozen=True)
class PromptScore:
    """Log-probabilities of the tokens of a prompt, from the second one on."""

    row: int
    logprobs: tuple[TokenLogprobs, ...]


BatchEvent = PromptScore | TextDelta | Completion


class _Row:
    """A text in the batch: its tokens, the state of its sampling, and its text."""

    def __init__(self, number: int, request: SequenceRequest, model: LanguageModel) -> None:
        self.number, self.request = number, request
        self.tokens = list(request.prompt)
        self.sampler = Sampler(request.sampling, [request.prompt], [request.sample])
        self.penalties = PenaltyState(request.penalties)
        self.text = SequenceText(
            *(number, model.tokenizer, request.prompt, model.eos_token_ids, request.stop),
            logprobs=request.logprobs is not None,
        )
        self.is_cached = False  # whether the KV cache has all tokens but the last

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class ContinuousBatch:
    """The texts that a model generates at this moment. Not for several threads at once.

    Args:
        model: The language model.
        eager: Launch the kernels of each step one by one, as in `GenerationConfig`.
    """

    def __init__(self, model: LanguageModel, eager: bool = False) -> None:
        self._source, self._model, self._eager = model, model.decoder, eager
        self._rows: dict[int, _Row] = {}
        self._cached: list[_Row] = []  # the rows of the KV cache, in its order
        self._cache: KVCache | None = None
        self._decode: Callable[[Tensor], Tensor] | None = None
        layers = self._model.config.layers
        self._borders = {one.rope.original_positions for one in layers if one.rope and one.rope.long_factors}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def admit(self, number: int, request: SequenceRequest) -> None:
        """Add a text, under a number that its events will have."""
        self._rows[number] = _Row(number, request, self._source)

    def remove(self, number: int) -> None:
        """Remove a text, if it has not ended."""
        self._rows.pop(number, None)

    def clear(self) -> None:
        """Remove all texts and free the KV cache."""
        self._rows.clear()
        self._cached, self._cache, self._decode = [], None, None

    def step(self) -> Iterator[BatchEvent]:
        """Read the prompts of new texts, or generate one token of every text; yield what became of them."""
        new = [row for row in self._rows.values() if not row.is_cached]
        yield from self._read_prompts(new) if new else self._generate_tokens()

    def _read_prompts(self, new: Sequence[_Row]) -> Iterator[BatchEvent]:
        parts: list[tuple[KVCache, Sequence[int]]] = []
        joining: list[_Row] = []
        for row in new:
            if row.request.score_prompt and row.num_new_tokens == 0:
                yield self._score_prompt(row)
            if row.request.max_new_tokens == 0:
                yield from row.text.finish("length")
                self.remove(row.number)
                continue
            cache = KVCache(self._model.config.num_layers, len(row.tokens))
            logits_1V = next_logits(self._model, torch.tensor([row.tokens]), cache)
            row.is_cached = True
            yield from self._sample(row, logits_1V)
            if self._stays(row):
                joining.append(row)
                parts.append((cache, [0]))
        self._rebuild_cache(joining, parts)

    def _generate_tokens(self) -> Iterator[BatchEvent]:
        if any(not self._stays(row) for row in self._cached) or (self._cache and self._is_full(self._cache)):
            self._rebuild_cache()
        if self._cache is None:
            return
        if self._decode is None:
            self._decode = make_decode_step(self._model, self._cache, self._eager)
        logits_BV = self._decode(torch.tensor([[row.tokens[-1]] for row in self._cached]))
        for index, row in enumerate(self._cached):
            yield from self._sample(row, logits_BV[index : index + 1])

    def _stays(self, row: _Row) -> bool:
        return row.is_cached and self._rows.get(row.number) is row

    @staticmethod
    def _is_full(cache: KVCache) -> bool:
        return cache.length == cache.capacity

    @torch.inference_mode()
    def _rebuild_cache(self, joining: Sequence[_Row] = (), parts: Sequence[tuple[KVCache, Sequence[int]]] = ()) -> None:
        """Leave out the rows of texts that have ended, and add those that join."""
        kept = [index for index, row in enumerate(self._cached) if self._stays(row) and row not in joining]
        self._cached = [*(self._cached[index] for index in kept), *joining]
        before = [(self._cache, kept)] if self._cache is not None and kept else []
        self._cache = join_rows([*before, *parts], _SPARE) if self._cached else None
        self._decode = None

    def _sample(self, row: _Row, logits_1V: Tensor) -> Iterator[BatchEvent]:
        logits_1V = logits_1V[:, : self._source.tokenizer.vocab_size]
        next_1 = row.sampler.next_tokens(row.penalties.apply(logits_1V))
        found = token_logprobs(logits_1V, next_1, row.request.logprobs)
        token = int(next_1[0])
        row.tokens.append(token)
        row.penalties.count(token)
        yield from row.text.add(token, None if found is None else found.row(0))
        if not row.text.finished and row.num_new_tokens == row.request.max_new_tokens:
            yield from row.text.finish("length")
        if row.text.finished:
            self.remove(row.number)
        elif len(row.tokens) - 1 in self._borders:
            row.is_cached = False  # LongRoPE rotates all positions differently from this length on

    def _score_prompt(self, row: _Row) -> PromptScore:
        assert row.request.logprobs is not None, "scores are log-probabilities"
        tokens, size = row.request.prompt, self._source.tokenizer.vocab_size
        scores = prompt_logprobs(self._source.decoder, tokens, row.request.logprobs, size)
        named = (name_logprobs(self._source.tokenizer, *one) for one in zip(tokens[1:], scores, strict=True))
        return PromptScore(row.number, tuple(named))
