"""Core attention by the backend that a run takes (plan/attention_choice.py); what torch selects itself is in core.py.

A backend serves a mask and a score modification, or raises: none is replaced by another. The rule attention.backend
refuses before the start what would raise here (plan/attention_backends.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_kernels import BlockBackend
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.flash_attn import load_flash_attn
from megalaunch.engine.model.attention.flex_attention import flex_attention_by_position
from megalaunch.engine.model.attention.mask import causal_document_mask
from megalaunch.engine.model.attention.package_attention import PackageKernel, package_attention
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.model.attention.transformer_engine import load_te_attention
from megalaunch.engine.model.attention.unfused_attention import unfused_attention
from megalaunch.engine.model.attention.varlen_attention import load_varlen_attention
from megalaunch.kernels.causal_attention import FusedBackend, sdpa_by
from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.plan.attention_choice import TakenBackend


@dataclass(frozen=True)
class SampleMask:
    """The causal mask of whole samples of `num_tokens` tokens.

    Attributes:
        documents_BS: Document ids; None: one document a sample.
        lengths_by_row: The lengths of the documents of each sample; None: of one document, or not needed.
        window: The sliding window in tokens; None: full attention.
    """

    num_tokens: int
    documents_BS: Tensor | None
    lengths_by_row: tuple[tuple[int, ...], ...] | None
    window: int | None

    @property
    def is_causal_only(self) -> bool:
        """True if each query sees its own and all earlier tokens."""
        return self.documents_BS is None and (self.window is None or self.window >= self.num_tokens)

    def dense(self, device: torch.device) -> Tensor:
        """Return the mask, bool [S, S], or [B, 1, S, S] with documents."""
        positions = torch.arange(self.num_tokens, device=device)
        return causal_document_mask(positions, positions, self.documents_BS, self.documents_BS, self.window)


RUN_KERNELS: Mapping[TakenBackend, Callable[[], PackageKernel]] = MappingProxyType(
    {"flash_attn": load_flash_attn, "te": load_te_attention, "varlen": load_varlen_attention}
)
"""Imports the kernel of a backend that is called on whole runs of queries, once, or raises an UnknownPackage."""

NEED_LENGTHS: frozenset[TakenBackend] = frozenset({"flash", *RUN_KERNELS})
"""The backends that need the lengths of packed documents, whatever the length of a sample."""


def attention_by(backend: TakenBackend, mask: SampleMask) -> AttentionFn:
    """Return attention over whole samples by a backend other than auto."""
    return _ATTENTION[backend](mask)


def _flash_attention(mask: SampleMask) -> AttentionFn:
    """Flash attention: one causal kernel, or one for each block of the mask, merged by the log-sum-exp."""
    by_blocks = _by_blocks(mask, "flash")

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        if mask.is_causal_only and scoring.is_default:
            return sdpa_by("flash", q, k, v, None, scoring.scale)
        return by_blocks(q, k, v, scoring)

    return attend


def _by_blocks(mask: SampleMask, kernel: BlockBackend) -> AttentionFn:
    tokens = (range(mask.num_tokens),)
    return blockwise_attention(make_block_mask(tokens, tokens, mask.window, mask.lengths_by_row), kernel)


def _sdpa(backend: FusedBackend, mask: SampleMask) -> AttentionFn:
    """One kernel of torch's operator, with a dense mask if the mask is more than causal."""
    made: list[Tensor] = []  # for the first layer, whose device it then has

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        if not scoring.is_default:
            raise ValueError(f"attention_backend={backend} computes no soft cap, sinks or dropout: use auto")
        if not mask.is_causal_only and not made:
            made.append(mask.dense(q.device))
        return sdpa_by(backend, q, k, v, made[0] if made else None, scoring.scale)

    return attend


def _flex_attention(mask: SampleMask) -> AttentionFn:
    tokens = (range(mask.num_tokens),)
    return flex_attention_by_position(tokens, tokens, mask.documents_BS, mask.window)


def _package(backend: TakenBackend, mask: SampleMask) -> AttentionFn:
    """A kernel that is called on whole runs of queries, with packed documents by their lengths."""
    return package_attention(RUN_KERNELS[backend], (range(mask.num_tokens),), mask.lengths_by_row, mask.window)


def _math(mask: SampleMask) -> AttentionFn:
    """Attention operator by operator; in long samples by blocks of queries, without a mask of all pairs."""
    if mask.num_tokens > DENSE_MASK_TOKENS:
        return _by_blocks(mask, "math")
    made: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        if not made:
            made.append(mask.dense(q.device))
        return unfused_attention(q, k, v, made[0], scoring)

    return attend


_ATTENTION: Mapping[TakenBackend, Callable[[SampleMask], AttentionFn]] = MappingProxyType(
    {
        "flash": _flash_attention,
        "cudnn": partial(_sdpa, "cudnn"),
        "efficient": partial(_sdpa, "efficient"),
        "flex": _flex_attention,
        "math": _math,
        **{backend: partial(_package, backend) for backend in RUN_KERNELS},
    }
)
