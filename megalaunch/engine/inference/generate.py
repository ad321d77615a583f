"""Token after token from a decoder, each step over the new positions only.

Shapes: B batch, S prompt length, V vocabulary, n likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.sampling import Sampler, Sampling
from megalaunch.engine.model.config import DecoderConfig

_FILLER = 0  # the token in front of shorter prompts; nobody sees it


class TextModel(Protocol):
    """A decoder, or one that lies over ranks."""

    @property
    def config(self) -> DecoderConfig:
        """Its shape."""

    @property
    def device(self) -> torch.device:
        """Where tokens have to be."""

    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: KVCache) -> Tensor:
        """Logits [B, 1, V] of the token after the last position."""


@dataclass(frozen=True)
class GenerationConfig:
    """What is wanted of every row: at most so many tokens, up to one of `ends`.

    Ids from `vocabulary` on are never written (a model's table may be larger than its tokenizer). `likeliest`: how
    many of the likeliest tokens are told at each place, with the log-probability of the one that was chosen.
    """

    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int] = frozenset()
    vocabulary: int | None = None
    likeliest: int | None = None


class Logprobs(NamedTuple):
    """Log-probabilities by the model itself, before penalty and temperature: the chosen tokens' [B], the n best's."""

    chosen_B: Tensor
    best_ids_Bn: Tensor
    best_Bn: Tensor


class SampledTokens(NamedTuple):
    """The next token of every row, [B] int64 on the CPU; of rows that had ended before it means nothing."""

    tokens_B: Tensor
    likelihoods: Logprobs | None


def generate_tokens(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    writing: GenerationConfig,
    samples: Sequence[int] | None = None,
    ended: list[bool] | None = None,
) -> Iterator[SampledTokens]:
    """Yield the next token of every prompt, up to `max_new_tokens` times, until all rows have ended.

    `samples`: which of its prompt's texts each row is (default: the first). `ended` is set when a row has written one
    of the ends, and may be set by the caller for other reasons. Raises ValueError for an empty prompt.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    ended = [False] * len(prompts) if ended is None else ended
    longest = max(len(prompt) for prompt in prompts)
    starts = [longest - len(prompt) for prompt in prompts]
    cache = KVCache(model.config.num_layers, longest + writing.max_new_tokens, starts)
    sampler = Sampler(writing.sampling, prompts, [0] * len(prompts) if samples is None else samples)
    tokens_BS = torch.tensor([[_FILLER] * start + list(row) for start, row in zip(starts, prompts, strict=True)])
    borders = {layer.rope.original_positions for layer in model.config.layers if layer.rope and layer.rope.long_factors}
    texts = [list(prompt) for prompt in prompts]
    for _ in range(writing.max_new_tokens):
        logits_BV = next_logits(model, tokens_BS, cache)[:, : writing.vocabulary]
        next_B = sampler.next_tokens(logits_BV)
        for row, token in enumerate(next_B.tolist()):
            ended[row] = ended[row] or token in writing.ends
        yield SampledTokens(next_B, _likelihoods(logits_BV, next_B, writing.likeliest))
        if all(ended):
            return
        tokens_BS = next_B[:, None]
        for text, token in zip(texts, next_B.tolist(), strict=True):
            text.append(token)
        if any(
            len(text) - 1 in borders for text in texts
        ):  # what is rotated from here on is so from the first token on
            cache = KVCache(model.config.num_layers, longest + writing.max_new_tokens, starts)
            tokens_BS = torch.tensor([[_FILLER] * start + text for start, text in zip(starts, texts, strict=True)])


@torch.no_grad()  # not inference_mode: a sharded model keeps what it gathers
def next_logits(model: TextModel, tokens_BS: Tensor, cache: KVCache) -> Tensor:
    """Logits [B, V] of the token after the last of these; they follow what the cache holds, and are added to it."""
    tokens_BS = tokens_BS.to(model.device)
    return model(tokens_BS, cache.begin(tokens_BS.shape[1], tokens_BS.device), cache)[:, -1]


def _likelihoods(logits_BV: Tensor, next_B: Tensor, likeliest: int | None) -> Logprobs | None:
    if likeliest is None:
        return None
    all_BV = logits_BV.float().log_softmax(dim=-1).cpu()
    best_Bn, ids_Bn = all_BV.topk(min(likeliest, all_BV.shape[1]), dim=-1)
    return Logprobs(all_BV.gather(1, next_B[:, None])[:, 0], ids_Bn, best_Bn)
