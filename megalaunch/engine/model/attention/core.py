"""Core attention, between the projections: softmax(q k^T) v under a causal mask.

Context parallelism implements the interface defined here; without it every rank holds all tokens of its samples.

Shapes: B batch, N query heads, G key/value groups, S queries or all tokens of a sample, s a rank's shard of them, T
keys, D head dim; that of values, and so of the output, may differ from that of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.model.attention.backends import NEED_LENGTHS, SampleMask, attention_by
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.documents import DocumentLengths, document_lengths, documents_by_row
from megalaunch.engine.model.attention.mask import AttentionMask, make_mask
from megalaunch.engine.model.attention.online_softmax import attention
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.model.dropout import TokenPlaces
from megalaunch.kernels.causal_attention import causal_sdpa
from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.plan.attention_choice import TakenBackend, TakenBackends


class ContextParallelism(Protocol):
    """How the tokens of a sample are sharded over context-parallel ranks, and attention over the shards."""

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position ids in the sample of this rank's `num_tokens` tokens, [s] int64."""

    def token_places(self, num_tokens: int, documents_Bs: Tensor | None, device: torch.device) -> TokenPlaces:
        """Return where this rank's tokens are in the samples of a microbatch; arguments as of `make_attention`."""

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the causal attention of each layer.

        Args:
            num_tokens: The number s of this rank's tokens.
            documents_Bs: Document ids: tokens attend within their document; None: to all earlier tokens.
            windows: The sliding window of each layer in tokens; None: full attention.
            device: The device of queries, keys and `documents_Bs`, on which masks and position ids are created.
        """


@dataclass(frozen=True)
class NoContextParallel:
    """No context parallelism: every rank holds all tokens of its samples. `lengths` reads document ids.

    `backends` are the kernels of attention that the run takes.
    """

    lengths: DocumentLengths = document_lengths
    backends: TakenBackends = TakenBackends()

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return 0, 1, ..."""
        return torch.arange(num_tokens, device=device)

    def token_places(self, num_tokens: int, documents_Bs: Tensor | None, device: torch.device) -> TokenPlaces:
        """Return 0, 1, ... of each row."""
        return TokenPlaces(self.position_ids(num_tokens, device))

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention of each layer; layers with the same window share one."""
        by_row = None
        if documents_Bs is not None and (self.backends.all & NEED_LENGTHS or num_tokens > DENSE_MASK_TOKENS):
            by_row = documents_by_row(documents_Bs, self.lengths)
        made = {
            window: whole_sample_attention(num_tokens, documents_Bs, by_row, window, self.backends.of(window))
            for window in set(windows)
        }
        return [made[window] for window in windows]


NO_CP = NoContextParallel()


def whole_sample_attention(
    num_tokens: int,
    documents_BS: Tensor | None,
    lengths_by_row: tuple[tuple[int, ...], ...] | None,
    window: int | None,
    backend: TakenBackend = "auto",
) -> AttentionFn:
    """Return causal attention on a rank that holds all tokens of its samples.

    Args:
        num_tokens: The tokens of a sample.
        documents_BS: Document ids; None: one document a sample.
        lengths_by_row: The lengths of the documents of each sample; needed by `NEED_LENGTHS` and in samples above
            `DENSE_MASK_TOKENS`.
        window: The sliding window in tokens; None: full attention.
        backend: The kernel.
    """
    if backend != "auto":
        return attention_by(backend, SampleMask(num_tokens, documents_BS, lengths_by_row, window))
    if documents_BS is None:
        return partial(causal_attention, window=window)
    if num_tokens > DENSE_MASK_TOKENS:
        tokens = (range(num_tokens),)
        return blockwise_attention(make_block_mask(tokens, tokens, window, lengths_by_row))
    positions = torch.arange(num_tokens, device=documents_BS.device)
    return masked_attention(make_mask(positions, positions, documents_BS, documents_BS, window))


def causal_attention(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /, window: int | None = None
) -> Tensor:
    """Return causal attention of the last S of T positions, over all or the last `window` positions: [B, N, S, D]."""
    if window is not None and q_BNSD.shape[2] == 1:
        k_BGTD, v_BGTD, window = k_BGTD[:, :, -window:], v_BGTD[:, :, -window:], None
    queries, keys = q_BNSD.shape[2], k_BGTD.shape[2]
    if queries in (1, keys) and scoring.is_default and (window is None or window >= keys):
        return causal_sdpa(q_BNSD, k_BGTD, v_BGTD, scoring.scale)
    if queries == keys > DENSE_MASK_TOKENS:
        tokens = (range(keys),)
        return blockwise_attention(make_block_mask(tokens, tokens, window))(q_BNSD, k_BGTD, v_BGTD, scoring)
    positions = torch.arange(keys, device=q_BNSD.device)
    mask = AttentionMask(positions[keys - queries :], positions, window=window)
    return attention(q_BNSD, k_BGTD, v_BGTD, mask, scoring)


def masked_attention(mask: AttentionMask) -> AttentionFn:
    """Return attention over the keys that the mask allows, on the mask's device."""

    def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        return attention(q_BNSD, k_BGTD, v_BGTD, mask, scoring)

    return attend
