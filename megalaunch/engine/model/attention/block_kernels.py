"""Attention of one block: by a fused kernel that returns the log-sum-exp, else in fp32 with all scores of the block.

Fused kernels take causal and full blocks; an anti-causal block is a causal one of reversed tokens. They compute no soft
cap and no dropout: for these the blocks are rectangles, whose masks are given by position ids.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim of queries and keys, F of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.attention.block_mask import Block, BlockMask
from megalaunch.engine.model.attention.online_softmax import (
    QUERIES,
    BlockwiseBackward,
    OnlineSoftmax,
    repeat_kv,
    sum_over_kv_group,
)
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.kernels.flash_attention import FLASH_KERNELS
from megalaunch.kernels.forms import BlockKernel, kernel_forms, on_cpu
from megalaunch.kernels.matmul import use_fp32_matmul

_TOKENS = 2  # the dim of tokens in [B, N, S, D]
_ALIGNMENT = 8  # CUDA kernels take head dims that it divides


BlockBackend = Literal["auto", "flash", "math"]
"""Which kernel computes a block: a flash kernel if there is one (auto), always, or never."""


def fused_kernel(q: Tensor, width: int, scoring: ScoreMod, backend: BlockBackend = "auto") -> BlockKernel | None:
    """Return the fused kernel for queries [B, N, S, D] and values of `width`; None: scores are computed in fp32.

    Raises:
        ValueError: `backend` is flash, and no flash kernel computes these inputs.
    """
    kernel = None if backend == "math" else _flash_kernel(q, width, scoring)
    if kernel is None and backend == "flash":
        kind = f"{q.dtype} heads of {max(width, q.shape[-1])} on {q.device.type}".removeprefix("torch.")
        raise ValueError(f"attention_backend=flash: no flash kernel for {kind}, soft caps or dropout: use auto")
    return kernel


def _flash_kernel(q: Tensor, width: int, scoring: ScoreMod) -> BlockKernel | None:
    if scoring.modifies_scores:
        return None
    form = kernel_forms().block_attention
    if form is not None:
        return form
    kernel = FLASH_KERNELS.get(q.device.type)
    return kernel if kernel is not None and kernel.supports(q, max(width, q.shape[-1])) else None


@dataclass(frozen=True)
class BlockInputs:
    """Queries [B, N, S, D], keys [B, G, T, D] and values [B, G, T, F] of a mask, and their score modification."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    scoring: ScoreMod
    backend: BlockBackend = "auto"

    @cached_property
    def kernel(self) -> BlockKernel | None:
        """The fused kernel of the blocks, if there is one."""
        return fused_kernel(self.q, self.v.shape[-1], self.scoring, self.backend)

    @property
    def blocks(self) -> Iterable[Block]:
        """The blocks to compute one by one."""
        return self.mask.blocks if self.kernel is not None else self.mask.rectangles(QUERIES)

    def attend(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the output of a block's queries, [B, N, ., F], and the log-sum-exp of scores, fp32 [B, N, ., 1]."""
        q, k, v = self._of(block)
        if self.kernel is None:
            alone, seen = OnlineSoftmax.empty(q, v.shape[-1], None), self.mask.attention_mask(block, q.device)
            alone.add(q, repeat_kv(k, q), repeat_kv(v, q), seen, self.scoring.of_row(block.row))
            return alone.output, alone.log_sum
        scale, width = self.scoring.softmax_scale(q), v.shape[-1]
        q, k, v = _kernel_inputs(block, q, k, v)
        out, log_sum = self.kernel.forward(q, k, v, block.shape != "full", scale)
        return _in_order(out[..., :width], block), _in_order(log_sum.unsqueeze(-1), block)

    def gradients(self, block: Block, shared: BlockwiseBackward) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's contributions to the gradients of its queries, keys and values."""
        q, k, v = self._of(block)
        part = shared.of_block(block)
        if self.kernel is None:
            seen, groups = self.mask.attention_mask(block, q.device), k.shape[1]
            scoring = self.scoring.of_row(block.row)
            dq, dk, dv = part.block(q, repeat_kv(k, q), repeat_kv(v, q), seen, scoring)
            return dq, sum_over_kv_group(dk, groups), sum_over_kv_group(dv, groups)
        scale, widths = self.scoring.softmax_scale(q), (q.shape[-1], k.shape[-1], v.shape[-1])
        q, k, v, out, dout = _kernel_inputs(block, q, k, v, part.out, part.dout)
        log_sum = _in_order(part.log_sum, block).squeeze(-1).contiguous()
        found = self.kernel.backward(q, k, v, out, dout, log_sum, block.shape != "full", scale)
        dq, dk, dv = (_in_order(x[..., :width], block) for x, width in zip(found, widths, strict=True))
        return dq, dk, dv

    def _of(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        return block.of_queries(self.q), block.of_keys(self.k), block.of_keys(self.v)


def _in_order(x: Tensor, block: Block) -> Tensor:
    """Return the tokens in the order in which the block is causal or full, or back in their own."""
    return x.flip(_TOKENS) if block.shape == "anti_causal" else x


def _kernel_inputs(block: Block, q: Tensor, *others: Tensor) -> list[Tensor]:
    """Return tensors in the order, dtype and width of the kernel.

    They are fp32 where a CPU multiplies 16 bits slowly, so that the outputs of blocks are not rounded either. Heads are
    padded with zeros to one width, as fused kernels ask.
    """
    inputs = [_in_order(x, block) for x in (q, *others)]
    if use_fp32_matmul(q):
        inputs = [x.float() for x in inputs]
    width = max(x.shape[-1] for x in inputs)
    width += 0 if on_cpu(q) else -width % _ALIGNMENT
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in inputs]
