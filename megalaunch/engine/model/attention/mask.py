"""Which keys each query sees, and where both stand in their sample.

Shapes: B batch, s queries, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """`mask` (bool, [..., s, T]): the keys a query attends to; None: positions and `window` decide alone.

    `q_positions` [s] and `k_positions` [T] are positions in the sample.
    """

    q_positions: Tensor
    k_positions: Tensor
    mask: Tensor | None = None
    window: int | None = None

    @property
    def allowed(self) -> Tensor:
        """The mask, made where there is none."""
        return (
            causal_document_mask(self.q_positions, self.k_positions, None, None, self.window)
            if self.mask is None
            else self.mask
        )

    def slice_queries(self, first: int, end: int) -> AttentionMask:
        """That of some of the queries."""
        mask = None if self.mask is None else self.mask[..., first:end, :]
        return replace(self, q_positions=self.q_positions[first:end], mask=mask)


def causal_document_mask(
    q_positions: Tensor,
    k_positions: Tensor,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    window: int | None = None,
) -> Tensor:
    """Which keys each query sees: itself and the `window` - 1 before it, of its own document. [q, k] or [B, 1, q, k].

    `places` [s] and [T] are where they stand in the sample; equal `documents` [B, s], [B, T] need not be neighbours.
    """
    distance = q_positions[:, None] - k_positions[None, :]
    shown = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents_q is None or documents_k is None:
        return shown
    return (shown & (documents_q[:, :, None] == documents_k[:, None, :])).unsqueeze(1)


def make_mask(
    q_positions: Tensor,
    k_positions: Tensor,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    window: int | None = None,
) -> AttentionMask:
    """With the mask of `visible`, made once for all layers that share it."""
    return AttentionMask(
        q_positions,
        k_positions,
        causal_document_mask(q_positions, k_positions, documents_q, documents_k, window),
        window,
    )


def from_mask(mask: Tensor) -> AttentionMask:
    """By a mask alone, where nothing is dropped: nobody asks for places."""
    nowhere = torch.empty(0, dtype=torch.int64, device=mask.device)
    return AttentionMask(nowhere, nowhere, mask)
