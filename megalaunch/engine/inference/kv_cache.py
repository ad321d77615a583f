"""The KV cache: keys and values of all earlier positions in every layer, and attention over them.

One contiguous buffer per layer and state, allocated at full size, so that a step copies only its new keys and values.
An attention layer chooses its states: keys and values, or others.

The KV cache is updated in `LayerKVCache.update`, which attention calls once per layer and forward pass, after RoPE:
cached keys are already rotated. A captured decode step (decode_graph.py) updates it in `update_at`. `KVCache.advance`
is called before each pass and returns the position ids.

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

    def update_at(self, slot_1: Tensor, width: int, *states: Tensor) -> list[Tensor]:
        """Write the states [B, G, 1, D] of the position in `slot_1` [1]; return views of the first `width` positions.

        No value is read on the host; `KVCache.append_slot` counts the position.
        """
        for buffer, state in zip(self._buffers, states, strict=True):
            buffer.index_copy_(2, slot_1, state)
        return [buffer.narrow(2, 0, width) for buffer in self._buffers]

    def states_of(self, rows: Sequence[int], length: int) -> list[Tensor]:
        """Return copies of the states of some rows, right-aligned: the last `length` positions, 0 before the first."""
        kept = min(length, self.length)
        return [
            F.pad(buffer[list(rows), :, self.length - kept : self.length], (0, 0, length - kept, 0))
            for buffer in self._buffers
        ]

    def clear_rest(self) -> None:
        """Set the states of positions that are not filled to 0: a mask hides them, but not NaN among them."""
        for buffer in self._buffers:
            buffer[:, :, self.length :].zero_()


class KVCache:
    """The KV caches of all layers, for rows of up to `capacity` tokens.

    Args:
        num_layers: The number of layers.
        capacity: Tokens per row, padding included.
        starts: The number of padding tokens at the front of each row: prompts of different lengths are left-padded. The
            padding is masked, and position ids are counted from its end.

    Attributes:
        layers: The KV cache of each layer.
        length: The number of tokens of each row so far, padding included.
        starts_B: `starts`, [B]; None: no row is padded.
    """

    def __init__(self, num_layers: int, capacity: int, starts: Sequence[int] = ()) -> None:
        self.layers = [LayerKVCache(capacity) for _ in range(num_layers)]
        self.capacity = capacity
        self.length = 0
        self.starts_B = torch.tensor(starts) if any(starts) else None

    def __getitem__(self, layer: int) -> LayerKVCache:
        """Return the KV cache of one layer."""
        return self.layers[layer]

    def advance(self, count: int, device: torch.device) -> Tensor:
        """Start a forward pass over the next `count` tokens; return position ids, [S], or [B, S] with padding."""
        slots_S = torch.arange(self.length, self.length + count, device=device)
        self.length += count
        if self.starts_B is None:
            return slots_S
        self.starts_B = self.starts_B.to(device)
        return (slots_S - self.starts_B[:, None]).clamp(min=0)

    def row_length(self, row: int) -> int:
        """Return the number of tokens of a row so far, without padding."""
        return self.length - (0 if self.starts_B is None else int(self.starts_B[row]))

    def append_slot(self) -> None:
        """Count one more position of every layer as filled, which `LayerKVCache.update_at` writes."""
        self.length += 1
        for layer in self.layers:
            layer.length += 1

    def attention(self, num_tokens: int, windows: Sequence[int | None]) -> Sequence[AttentionFn]:
        """Return each layer's attention of the last `num_tokens` positions over all so far; `windows`: None is full."""
        made = {window: self._attend(num_tokens, window) for window in set(windows)}
        return [made[window] for window in windows]

    def _attend(self, num_tokens: int, window: int | None) -> AttentionFn:
        if self.starts_B is None and num_tokens > 1:
            return partial(causal_attention, window=window)
        first = 0 if window is None or num_tokens > 1 else max(0, self.length - window)
        if self.starts_B is None:
            return partial(decode_attention, first=first)
        shown = self._attention_mask(self.starts_B, num_tokens, window)[..., first:]
        return partial(decode_attention, first=first, shown=shown) if num_tokens == 1 else partial(_masked, shown=shown)

    def _attention_mask(self, starts_B: Tensor, num_tokens: int, window: int | None) -> Tensor:
        """Return the mask [B, 1, S, T] of left-padded rows. Padding attends to itself: a softmax over no key is NaN."""
        keys = torch.arange(self.length, device=starts_B.device)
        distance = keys[self.length - num_tokens :, None] - keys
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return ((near & (keys >= starts_B[:, None, None])) | (distance == 0)).unsqueeze(1)


def join_rows(parts: Sequence[tuple[KVCache, Sequence[int]]], spare: int) -> KVCache:
    """Return a KV cache with some rows of each of several, in this order, and room for `spare` more tokens.

    Rows are right-aligned, so that all of them go on at the same position of the buffers: rows may join a batch, and
    leave it, between any two steps.
    """
    lengths = [cache.row_length(row) for cache, rows in parts for row in rows]
    longest = max(lengths)
    first, _ = parts[0]
    joined = KVCache(len(first.layers), longest + spare, [longest - length for length in lengths])
    joined.length = longest
    for number, layer in enumerate(joined.layers):
        states = zip(*(cache[number].states_of(rows, longest) for cache, rows in parts), strict=True)
        layer.update(*(torch.cat(rows) for rows in states))
    return joined


def _masked(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /, *, shown: Tensor
) -> Tensor:
    return attention(q_BNSD, k_BGTD, v_BGTD, from_mask(shown), scoring)


def decode_attention(
    q_BN1D: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scoring: ScoreMod = DEFAULT_SCORE_MOD,
    /,
    *,
    first: int = 0,
    shown: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row, over the keys from `first` on that `shown` [..., 1, T] allows (None: all).

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
