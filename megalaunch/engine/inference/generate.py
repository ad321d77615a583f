"""Token after token from a decoder, each step over the new positions only.

Shapes: B batch, S prompt length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.inference.cache import LayerCache, make_cache
from megalaunch.engine.inference.sampling import Sampler, Sampling
from megalaunch.engine.model.config import DecoderConfig


class TextModel(Protocol):
    """A decoder, or one that lies over ranks."""

    @property
    def config(self) -> DecoderConfig:
        """Its shape."""

    @property
    def device(self) -> torch.device:
        """Where tokens have to be."""

    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: Sequence[LayerCache]) -> Tensor:
        """Logits [B, s, V] of the token after each of the last s positions, s >= 1."""


def generate_tokens(
    model: TextModel,
    prompts_BS: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    end_id: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every prompt, [B] int64 on the CPU, up to `max_new_tokens` times.

    A row that has written `end_id` yields `end_id` from then on; when all rows have, it ends. Ids from
    `vocabulary` on are never written (a model's table may be larger than its tokenizer).
    """
    batch, length = prompts_BS.shape
    if length == 0:
        raise ValueError("a prompt needs at least one token")
    cache = make_cache(model.config.num_layers, length + max_new_tokens)
    sampler = Sampler(sampling, batch)
    ended = torch.zeros(batch, dtype=torch.bool)
    tokens_BS = prompts_BS
    for _ in range(max_new_tokens):
        logits_BV = next_logits(model, tokens_BS, cache)
        next_B = sampler.next_tokens(logits_BV[:, :vocabulary])
        if end_id is not None:
            next_B = next_B.masked_fill(ended, end_id)
            ended |= next_B == end_id
        yield next_B
        if ended.all():
            return
        tokens_BS = next_B[:, None]


@torch.no_grad()  # not inference_mode: a sharded model keeps what it gathers
def next_logits(model: TextModel, tokens_BS: Tensor, cache: Sequence[LayerCache]) -> Tensor:
    """Logits [B, V] of the token after the last of these; they follow what the cache holds, and are added to it."""
    tokens_BS = tokens_BS.to(model.device)
    seen = cache[0].length
    positions_S = torch.arange(seen, seen + tokens_BS.shape[1], device=tokens_BS.device)
    logits_BsV = model(tokens_BS, positions_S, cache)
    return logits_BsV[:, -1]
