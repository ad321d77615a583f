"""The KV cache: keys and values of all earlier positions in every layer, and attention over them.

One contiguous buffer per layer and state, allocated at full size, so that a step copies only its new keys and values.
An attention layer chooses its states: keys and values, or others.

The KV cache is updated in `LayerKVCache.update`, which attention calls once per layer and forward pass, after RoPE:
cached keys are already rotated. `KVCache.advance` is called before each pass and returns the position ids.

Shapes: B batch, N query heads, G key/value groups, S new positions, T all positions so far, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.attention.mask import from_mask
from megalaunch.engine.model.attention.online_softmax import attention
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod


class LayerKVCache:
    """The KV cache of one layer: states [B, G, capacity, D] (keys and values), of which `length` positions are filled.

    The buffers are allocated by the first `update`, one for each state, with its shape and dtype and on its device.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffers: list[Tensor] = []
        self.length = 0

    def update(self, *states: Tensor) -> list[Tensor]:
        """Update the KV cache: append the states [B, G, S, D] of the next S positions.

        Returns:
            Views of the states of all positions so far, [B, G, T, D].

        Raises:
            ValueError: The positions exceed the capacity.
        """
        start, count = self.length, states[0].shape[2]
        end = start + count
        if end > self._capacity:
            raise ValueError(f"the cache holds {self._capacity} positions, {end} are asked for")
        if not self._buffers:
            self._buffers = [state.new_empty(*state.shape[:2], self._capacity, state.shape[3]) for state in states]
        for buffer, state in zip(self._buffers, states, strict=True):
            buffer.narrow(2, start, count).copy_(state)
        self.length = end
        return [buffer.narrow(2, 0, end) for buffer in self._buffers]


class KVCache:
    """The KV caches of all layers, for rows of up to `capacity` tokens.

    Args:
        num_layers: The number of layers.
        capacity: Tokens per row, padding included.
        starts: The number of padding tokens at the front of each row: prompts of different lengths are left-padded. The
            padding is masked, and position ids are counted from its end.
    """

    def __init__(self, num_layers: int, capacity: int, starts: Sequence[int] = ()) -> None:
        self._layers = [LayerKVCache(capacity) for _ in range(num_layers)]
        self._starts_B = torch.tensor(starts) if any(starts) else None
        self._length = 0

    def __getitem__(self, layer: int) -> LayerKVCache:
        """Return the KV cache of one layer."""
        return self._layers[layer]

    def advance(self, count: int, device: torch.device) -> Tensor:
        """Start a forward pass over the next `count` tokens; return position ids, [S], or [B, S] with padding."""
        slots_S = torch.arange(self._length, self._length + count, device=device)
        self._length += count
        if self._starts_B is None:
            return slots_S
        self._starts_B = self._starts_B.to(device)
        return (slots_S - self._starts_B[:, None]).clamp(min=0)

    def attention(self, num_tokens: int, windows: Sequence[int | None]) -> Sequence[AttentionFn]:
        """Return each layer's attention of the last `num_tokens` positions over all so far; `windows`: None is full."""
        made = {window: self._attend(num_tokens, window) for window in set(windows)}
        return [made[window] for window in windows]

    def _attend(self, num_tokens: int, window: int | None) -> AttentionFn:
        if self._starts_B is None and num_tokens > 1:
            return partial(causal_attention, window=window)
        first = 0 if window is None or num_tokens > 1 else max(0, self._length - window)
        if self._starts_B is None:
            return partial(_decode_attention, first=first)
        shown = self._attention_mask(self._starts_B, num_tokens, window)[..., first:]
        return (
            partial(_decode_attention, first=first, shown=shown) if num_tokens == 1 else partial(_masked, shown=shown)
        )

    def _attention_mask(self, starts_B: Tensor, num_tokens: int, window: int | None) -> Tensor:
        """Return the mask [B, 1, S, T] of left-padded rows. Padding attends to itself: a softmax over no key is NaN."""
        keys = torch.arange(self._length, device=starts_B.device)
        distance = keys[self._length - num_tokens :, None] - keys
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return ((near & (keys >= starts_B[:, None, None])) | (distance == 0)).unsqueeze(1)


def _masked(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /, *, shown: Tensor
) -> Tensor:
    return attention(q_BNSD, k_BGTD, v_BGTD, from_mask(shown), scoring)


def _decode_attention(
    q_BN1D: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scoring: ScoreMod = DEFAULT_SCORE_MOD,
    /,
    *,
    first: int,
    shown: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row, over the keys from `first` on.

    The query heads of a key/value group are passed as positions of one head, so that no key is repeated.
    """
    if first:
        k_BGTD, v_BGTD = k_BGTD[:, :, first:], v_BGTD[:, :, first:]
    if not scoring.is_default:
        mask = shown if shown is not None else torch.ones(1, k_BGTD.shape[2], dtype=torch.bool, device=k_BGTD.device)
        return attention(q_BN1D, k_BGTD, v_BGTD, from_mask(mask), scoring)
    batch, heads, _, width = q_BN1D.shape
    groups = k_BGTD.shape[1]
    shared = q_BN1D.reshape(batch, groups, heads // groups, width)
    out = F.scaled_dot_product_attention(shared, k_BGTD, v_BGTD, attn_mask=shown, scale=scoring.scale)
    return out.reshape(batch, heads, 1, -1)
