"""Decode steps as captured graphs, on devices that capture them (CUDA graphs): one launch for all kernels of a token.

A small model's decode step is hundreds of kernels, each shorter than its launch. A graph replays them on fixed shapes
and addresses, so a captured step takes its token and its slot in the KV cache from device tensors, and attends to all
slots up to a border. A mask hides those that are not filled. At each border a graph with the next one is captured.

Shapes: B batch, T slots of the KV cache that a step attends to, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megalaunch.engine.inference.kv_cache import KVCache, LayerKVCache, decode_attention
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.platform.platform import CapturedGraph
from megalaunch.engine.platform.registry import platform_of

BORDER = 256  # slots between borders: a step reads at most so many unfilled ones


def can_capture(model: Decoder) -> bool:
    """Return whether the decode steps of a decoder can be captured on its device.

    Not those of routed experts, whose kernels depend on the tokens, of LongRoPE, whose factors are copied from the
    host, and of a decoder whose parameters FSDP gathers into new memory (which changes its type).
    """
    layers = model.config.layers
    routed = any(layer.moe_layer is not None for layer in model.all_layers.values())
    long_rope = any(layer.rope is not None and layer.rope.scaling == "longrope" for layer in layers)
    return type(model) is Decoder and not routed and not long_rope and platform_of(model.device).captures_graphs


class DecodeGraph:
    """The decode steps of a decoder over one KV cache, which holds the prompts already.

    Args:
        model: A decoder for which `can_capture` holds.
        cache: The KV cache; nothing else may add to it from now on.
    """

    @torch.inference_mode()
    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._slot_1 = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._tokens_B1: Tensor | None = None
        self._width = 0
        self._graph: CapturedGraph | None = None
        for layer in cache.layers:
            layer.clear_rest()

    @torch.inference_mode()
    def next_logits(self, tokens_B1: Tensor) -> Tensor:
        """Run one new token per row, update the KV cache and return the next token's logits [B, V].

        Raises:
            ValueError: The KV cache is full.
        """
        self._load_inputs(tokens_B1)
        if self._cache.length > self._width:
            self._width = min(-(-self._cache.length // BORDER) * BORDER, self._cache.capacity)
            self._graph = None
            return self._step()  # the run that must precede a capture
        if self._graph is None:
            self._graph = platform_of(self._model.device).capture_graph(self._step)
        self._graph.replay()
        return self._graph.result.clone()

    def _load_inputs(self, tokens_B1: Tensor) -> None:
        if self._cache.length >= self._cache.capacity:
            raise ValueError(f"the cache holds {self._cache.capacity} positions, one more is asked for")
        self._slot_1.fill_(self._cache.length)
        if self._tokens_B1 is None:
            self._tokens_B1 = tokens_B1.to(self._model.device, copy=True)
        else:
            self._tokens_B1.copy_(tokens_B1)
        self._cache.append_slot()

    def _step(self) -> Tensor:
        assert self._tokens_B1 is not None
        slots = _SlotCache(self._cache, self._slot_1, self._width)
        return self._model(self._tokens_B1, slots.positions(), slots)[:, -1]


class _SlotCache:
    """A KV cache as a captured step uses it: the next position is a tensor, and shapes do not depend on it."""

    def __init__(self, cache: KVCache, slot_1: Tensor, width: int) -> None:
        self._cache, self._slot_1, self._width = cache, slot_1, width
        self._starts_B = cache.starts_B  # on the device since the prompts' pass

    def __getitem__(self, layer: int) -> _LayerSlotCache:
        return _LayerSlotCache(self._cache[layer], self._slot_1, self._width)

    def positions(self) -> Tensor:
        """Return the position ids, [1], or [B, 1] with padding."""
        return self._slot_1 if self._starts_B is None else self._slot_1 - self._starts_B[:, None]

    def attention(self, num_tokens: int, windows: Sequence[int | None]) -> Sequence[AttentionFn]:
        """Return each layer's attention of the new position over those so far."""
        assert num_tokens == 1, "a captured step runs one new token per row"
        made = {window: partial(decode_attention, shown=self._mask(window)) for window in set(windows)}
        return [made[window] for window in windows]

    def _mask(self, window: int | None) -> Tensor:
        """Return the mask of the filled slots in the window, [1, T], or [B, 1, 1, T] with padding."""
        keys_T = torch.arange(self._width, device=self._slot_1.device)
        shown_T = keys_T <= self._slot_1
        if window is not None:
            shown_T = shown_T & (keys_T > self._slot_1 - window)
        if self._starts_B is None:
            return shown_T[None]
        return (shown_T & (keys_T >= self._starts_B[:, None]))[:, None, None]


class _LayerSlotCache:
    """The KV cache of one layer in a captured step."""

    def __init__(self, cache: LayerKVCache, slot_1: Tensor, width: int) -> None:
        self._cache, self._slot_1, self._width = cache, slot_1, width

    def update(self, *states: Tensor) -> list[Tensor]:
        """Write the new position's states [B, G, 1, D]; return views of all slots [B, G, T, D]."""
        return self._cache.update_at(self._slot_1, self._width, *states)
