"""Autoregressive generation with a KV cache: each forward pass runs over the new positions only.

Shapes: B batch, S prompt length, V vocabulary, n most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalaunch.engine.inference.decode_graph import DecodeGraph, can_capture
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.sampling import Sampler, Sampling
from megalaunch.engine.inference.sequence_text import RowLogprobs
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder

_FILLER = 0  # left padding of shorter prompts; it is masked


class TextModel(Protocol):
    """A decoder on one device, or one sharded over ranks."""

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config."""

    @property
    def device(self) -> torch.device:
        """The device that tokens must be on."""

    def __call__(self, tokens_BS: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:
        """Run new tokens [B, S] at `positions`, update the KV caches and return the next token's logits [B, 1, V]."""


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of generation, for every row.

    Args:
        max_new_tokens: Maximum number of new tokens.
        sampling: The sampling parameters.
        eos_token_ids: Ids of the tokens that end a text.
        vocab_size: Ids from here on are never sampled: a model's embedding may have more rows than its tokenizer.
        logprobs: Return log-probabilities of the sampled token and of this many most likely tokens; None: of none.
        eager: Launch the kernels of every step one by one, also where a device can replay them as a graph.
    """

    max_new_tokens: int
    sampling: Sampling
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    logprobs: int | None = None
    eager: bool = False


class Logprobs(NamedTuple):
    """Log-probabilities before penalty and temperature: of the sampled tokens [B], and of the n most likely [B, n]."""

    chosen_B: Tensor
    top_ids_Bn: Tensor
    top_Bn: Tensor

    def row(self, index: int) -> RowLogprobs:
        """Return those of one row."""
        top = zip(self.top_ids_Bn[index].tolist(), self.top_Bn[index].tolist(), strict=True)
        return RowLogprobs(float(self.chosen_B[index]), list(top))


class SampledTokens(NamedTuple):
    """The next token of every row, [B] int64 on the CPU. Tokens of rows that had ended before are meaningless."""

    tokens_B: Tensor
    logprobs: Logprobs | None


def generate_tokens(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    samples: Sequence[int] | None = None,
    ended: list[bool] | None = None,
) -> Iterator[SampledTokens]:
    """Yield the next token of every prompt, up to `max_new_tokens` times, until all rows have ended.

    Args:
        model: Computes the logits.
        prompts: Token ids of each row; shorter prompts are left-padded.
        config: The settings.
        samples: The index of each row among the completions of its prompt, for its random seed (default: 0).
        ended: Set to True here for rows that sampled an end; the caller may also set rows, such as at a stop string.

    Raises:
        ValueError: A prompt is empty.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    ended = [False] * len(prompts) if ended is None else ended
    longest = max(len(prompt) for prompt in prompts)
    starts = [longest - len(prompt) for prompt in prompts]
    cache = KVCache(model.config.num_layers, longest + config.max_new_tokens, starts)
    sampler = Sampler(config.sampling, prompts, [0] * len(prompts) if samples is None else samples)
    tokens_BS = torch.tensor([[_FILLER] * start + list(row) for start, row in zip(starts, prompts, strict=True)])
    borders = {layer.rope.original_positions for layer in model.config.layers if layer.rope and layer.rope.long_factors}
    texts = [list(prompt) for prompt in prompts]
    decode: Callable[[Tensor], Tensor] | None = None  # None: the cache is empty
    for _ in range(config.max_new_tokens):
        if decode is None:
            logits_BV = next_logits(model, tokens_BS, cache)
            decode = make_decode_step(model, cache, config.eager)
        else:
            logits_BV = decode(tokens_BS)
        logits_BV = logits_BV[:, : config.vocab_size]
        next_B = sampler.next_tokens(logits_BV)
        for row, token in enumerate(next_B.tolist()):
            ended[row] = ended[row] or token in config.eos_token_ids
        yield SampledTokens(next_B, token_logprobs(logits_BV, next_B, config.logprobs))
        if all(ended):
            return
        tokens_BS = next_B[:, None]
        for text, token in zip(texts, next_B.tolist(), strict=True):
            text.append(token)
        if any(len(text) - 1 in borders for text in texts):
            # LongRoPE rotates all positions differently from this length on: recompute the KV cache.
            cache = KVCache(model.config.num_layers, longest + config.max_new_tokens, starts)
            tokens_BS = torch.tensor([[_FILLER] * start + text for start, text in zip(starts, texts, strict=True)])
            decode = None


def make_decode_step(model: TextModel, cache: KVCache, eager: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that runs one new token per row, [B, 1], after those in the KV cache, as `next_logits` does."""
    if not eager and isinstance(model, Decoder) and can_capture(model):
        return DecodeGraph(model, cache).next_logits
    return lambda tokens_B1: next_logits(model, tokens_B1, cache)


@torch.inference_mode()
def next_logits(model: TextModel, tokens_BS: Tensor, cache: KVCache) -> Tensor:
    """Run new tokens after those in the KV cache, update it and return the next token's logits [B, V]."""
    tokens_BS = tokens_BS.to(model.device)
    return model(tokens_BS, cache.advance(tokens_BS.shape[1], tokens_BS.device), cache)[:, -1]


def token_logprobs(logits_BV: Tensor, next_B: Tensor, num_top: int | None) -> Logprobs | None:
    """Return the log-probabilities of the tokens [B] and of the `num_top` most likely ones; None: of none."""
    if num_top is None:
        return None
    all_BV = logits_BV.float().log_softmax(dim=-1).cpu()
    top_Bn, ids_Bn = all_BV.topk(min(num_top, all_BV.shape[1]), dim=-1)
    return Logprobs(all_BV.gather(1, next_B[:, None])[:, 0], ids_Bn, top_Bn)
