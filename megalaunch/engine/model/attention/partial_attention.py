"""Attention of queries over a part of the keys that they see, whose outputs are merged by their log-sum-exp.

Out of parts of the keys p:  lse = log sum_p exp(lse_p),  out = sum_p exp(lse_p - lse) out_p   (online softmax, fp32)

A ring computes a part at a time, of the keys of one rank: by blocks (block_attention.py), whose kernels have a backward
pass of one block, or by FlexAttention, which has none.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.model.attention.block_attention import add_blocks, add_gradients
from megalaunch.engine.model.attention.block_kernels import BlockBackend, BlockInputs
from megalaunch.engine.model.attention.block_mask import Block, BlockMask
from megalaunch.engine.model.attention.flex_attention import FlexMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.score_mod import ScoreMod


class PartialAttention(Protocol):
    """Attention over a part of the keys: queries [B, N, S, D], keys [B, G, T, D], values [B, G, T, F]."""

    def add_output(self, merged: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod) -> None:
        """Merge the output of this part."""

    def add_gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], scoring: ScoreMod, shared: BlockwiseBackward, *sums: Tensor
    ) -> None:
        """Add what this part contributes to the gradients of queries, keys and values to these fp32 `sums`."""


@dataclass(frozen=True)
class BlockwisePart:
    """Attention over a part of the keys by the blocks of a mask; `kernel` as of `fused_kernel`."""

    mask: BlockMask
    kernel: BlockBackend = "auto"

    def add_output(self, merged: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod) -> None:
        """Merge the outputs of all blocks."""
        add_blocks(merged, BlockInputs(q, k, v, self.mask, scoring, self.kernel))

    def add_gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], scoring: ScoreMod, shared: BlockwiseBackward, *sums: Tensor
    ) -> None:
        """Add the gradients of all blocks."""
        add_gradients(BlockInputs(*qkv, self.mask, scoring, self.kernel), shared, *sums)


@dataclass(frozen=True)
class FlexPart:
    """Attention over a part of the keys by one call of FlexAttention.

    With the log-sum-exp L of all parts, w = exp(lse_p - L) is this part's share of the weights. The gradients of its
    output and log-sum-exp, through which FlexAttention's backward pass gives those of q, k and v, are

    dout_p = w dout,  dlse_p = rowsum(dout_p * out_p) - w rowsum(dout * out)

    FlexAttention takes the output and the log-sum-exp of its own forward pass, which is therefore computed once more.
    """

    mask: FlexMask

    def add_output(self, merged: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod) -> None:
        """Merge the output of this part."""
        out, log_sum = self._attend(_leaves(q, k, v), scoring)
        tokens = Block(range(q.shape[2]), range(k.shape[2]))
        merged.merge(tokens, out.detach(), log_sum.detach().unsqueeze(-1))

    def add_gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], scoring: ScoreMod, shared: BlockwiseBackward, *sums: Tensor
    ) -> None:
        """Add the gradients of this part."""
        leaves = _leaves(*qkv)
        out, log_sum = self._attend(leaves, scoring)
        weight = (log_sum.detach().unsqueeze(-1) - shared.log_sum).exp_()
        dout = (shared.dout * weight).to(out.dtype)
        # Of the rounded gradient, as FlexAttention has it: what it subtracts from weights' gradients is w share.
        own = (dout.float() * out.detach()).sum(dim=-1)
        dlog_sum = own.sub_((weight * shared.share).squeeze(-1))
        found = torch.autograd.grad((out, log_sum), leaves, (dout, dlog_sum))
        for total, gradient in zip(sums, found, strict=True):
            total.add_(gradient)

    def _attend(self, leaves: tuple[Tensor, Tensor, Tensor], scoring: ScoreMod) -> tuple[Tensor, Tensor]:
        # With gradients in both passes: one graph is compiled for them. Forward lets go of it at once.
        with torch.enable_grad():
            return self.mask.attend(*leaves, scoring)


def _leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
