"""Which part of every sample a rank holds, and how its queries reach the keys: the one-device form.

Shapes: B batch, N query heads, G key/value groups, S all tokens of a sample, s those of this rank, T keys at hand,
D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, N, s, D], keys and values [B, G, T, D] -> [B, N, s, D]."""


class Context(Protocol):
    """A sample's tokens as they lie over ranks."""

    def places(self, held: int, device: torch.device) -> Tensor:
        """Where the `held` tokens of this rank stand in their sample, [s] int64."""

    def attention(self, held: int, documents_Bs: Tensor | None, layers: int) -> Sequence[Attend]:
        """Causal attention of each layer, within documents where they are given."""


class WholeSample:
    """Every rank holds all tokens of its samples."""

    def places(self, held: int, device: torch.device) -> Tensor:
        """0, 1, ..."""
        return torch.arange(held, device=device)

    def attention(self, held: int, documents_Bs: Tensor | None, layers: int) -> Sequence[Attend]:
        """One and the same for all layers."""
        if documents_Bs is None:
            return [causal] * layers
        places = self.places(held, documents_Bs.device)
        return [seen(visible(places, places, documents_Bs, documents_Bs))] * layers


WHOLE_SAMPLE = WholeSample()


def visible(places_q: Tensor, places_k: Tensor, documents_q: Tensor | None, documents_k: Tensor | None) -> Tensor:
    """Which keys each query sees: earlier ones and itself, of its own document. [q, k] or [B, 1, q, k] bool.

    `places` [s] and [T] are where they stand in the sample; equal `documents` [B, s], [B, T] need not be neighbours.
    """
    earlier = places_q[:, None] >= places_k[None, :]
    if documents_q is None or documents_k is None:
        return earlier
    return (earlier & (documents_q[:, :, None] == documents_k[:, None, :])).unsqueeze(1)


def causal(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Attention of the last S of T positions over all T: [B, N, S, D]."""
    queries, keys = q_BNSD.shape[2], k_BGTD.shape[2]
    if queries in (1, keys):
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, is_causal=queries > 1, enable_gqa=q_BNSD.shape[1] != k_BGTD.shape[1]
        )
    places = torch.arange(keys, device=q_BNSD.device)
    return seen(visible(places[keys - queries :], places, None, None))(q_BNSD, k_BGTD, v_BGTD)


def seen(mask: Tensor) -> Attend:
    """Attention over the keys that `mask` (bool, [..., q, k]) shows."""

    def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        grouped = q_BNSD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(q_BNSD, k_BGTD, v_BGTD, attn_mask=mask, enable_gqa=grouped)

    return attend
