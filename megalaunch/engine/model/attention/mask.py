"""Attention masks: which keys each query attends to, and the position ids of both.

Shapes: B batch, s queries, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """An attention mask, explicit or given by position ids.

    Args:
        q_positions: Position ids of the queries in the sample, [s].
        k_positions: Position ids of the keys, [T].
        mask: True where a query attends to a key, bool [..., s, T]; None: causal by position ids and `window`.
        window: The sliding window in tokens; None: full attention.
    """

    q_positions: Tensor
    k_positions: Tensor
    mask: Tensor | None = None
    window: int | None = None

    @property
    def allowed(self) -> Tensor:
        """The explicit mask, or the causal mask of the position ids."""
        return (
            causal_document_mask(self.q_positions, self.k_positions, None, None, self.window)
            if self.mask is None
            else self.mask
        )

    def slice_queries(self, first: int, end: int) -> AttentionMask:
        """Return the mask of the queries `first` to `end`."""
        mask = None if self.mask is None else self.mask[..., first:end, :]
        return replace(self, q_positions=self.q_positions[first:end], mask=mask)


def causal_document_mask(
    q_positions: Tensor,
    k_positions: Tensor,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    window: int | None = None,
) -> Tensor:
    """Return where a query attends to a key: to itself and the `window` - 1 positions before it, within its document.

    Args:
        q_positions: Position ids of the queries in the sample, [s].
        k_positions: Position ids of the keys, [T].
        documents_q: Document ids of the queries, [B, s]; tokens of a document need not be adjacent. None: one document.
        documents_k: Document ids of the keys, [B, T].
        window: The sliding window in tokens; None: all earlier positions.

    Returns:
        A bool mask, [s, T], or [B, 1, s, T] with documents.
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
    """Return a mask with an explicit `causal_document_mask`, computed once for all layers that share it."""
    return AttentionMask(
        q_positions,
        k_positions,
        causal_document_mask(q_positions, k_positions, documents_q, documents_k, window),
        window,
    )


def from_mask(mask: Tensor) -> AttentionMask:
    """Build from an explicit mask; positions are only needed for attention dropout."""
    nowhere = torch.empty(0, dtype=torch.int64, device=mask.device)
    return AttentionMask(nowhere, nowhere, mask)
