"""The loss: cross-entropy summed over tokens, on one rank (kernels/cross_entropy.py) and vocab-parallel.

Each loss of a step is such a sum, divided by the global number of valid tokens before backward (forward_backward.py).
`LinearCrossEntropy` takes the decoder's logits, or multiplies by the head itself in chunks, to hold fewer logits; on a
GPU kernels compute the loss from logits in the compute dtype (kernels/linear_loss.py).
Shapes: B batch, S sequence, s a rank's shard of it, T tokens (B S), C tokens of a chunk, H hidden, V vocabulary, v a
rank's shard of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import all_reduce_async, all_reduce_max
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.decoder import Decoder
from megalaunch.kernels.cross_entropy import cross_entropy, logits_grad, subtract_max
from megalaunch.kernels.forms import LossKernels
from megalaunch.kernels.linear_loss import loss_kernels
from megalaunch.plan.memory.loss import SUM_ROWS

IGNORE_INDEX = -100  # label of a token without a loss: the loss mask is stored in the labels


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor, vocabulary: Axis, columns: int | None = None) -> Tensor:
    """Sum the cross-entropies of all labels other than IGNORE_INDEX.

    Overwrites the logits: padding columns are set to -inf, and on a CPU the tensors that are saved for backward reuse
    their memory.

    Args:
        logits_BSV: Logits; with a vocabulary axis of size > 1, this rank's shard [B, S, v].
        labels_BS: Token ids, or IGNORE_INDEX.
        vocabulary: The axis that shards the vocabulary; each of its ranks returns the full loss.
        columns: Number of columns of this rank that belong to tokens, None: all; the others are vocabulary padding.

    Returns:
        The sum in nats, an fp32 scalar.
    """
    logits, labels = logits_BSV.float().flatten(0, 1), labels_BS.flatten()
    if columns is not None and columns < logits.shape[1]:
        logits.detach()[:, columns:] = -math.inf  # probability 0, and so gradient 0
    if vocabulary.size == 1:
        return cross_entropy(logits, labels, IGNORE_INDEX)
    return apply_function(_VocabParallelCrossEntropy, logits, labels, vocabulary)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Vocab-parallel cross-entropy: each rank holds the logits z of its shard of the vocabulary.

    Forward:   m = all_reduce_max(max_v z_v);  s, z_label = all_reduce_sum(sum_v exp(z_v - m), z_label - m)
               loss = sum_t log(s) - z_label.  A rank whose shard lacks the label contributes 0 to z_label.
    Backward:  dz_v = (p_v - [v = label]) * dloss,  p_v = exp(z_v - m) / s, and 0 for ignored labels

    Only two all-reduces communicate, of one and of two numbers per token; backward needs none. Probabilities are saved
    for backward; on a CPU they, and then the gradient, overwrite the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, labels_T: Tensor, axis: Axis) -> Tensor:
        width = logits_Tv.shape[1]
        largest = all_reduce_max(logits_Tv.amax(dim=1), axis)
        own = logits_Tv.detach()  # autograd forbids in-place changes to a view that another Function returned
        shifted = subtract_max(own, largest)
        columns = labels_T - axis.rank * width
        mine = (columns >= 0) & (columns < width)
        columns = columns.where(mine, 0)
        label_logits = shifted.gather(1, columns[:, None])[:, 0].where(mine, 0)  # no product: -inf (padding) * 0 is NaN
        exponentials = shifted.exp_()
        sums, label_logits = all_reduce_async(torch.stack((exponentials.sum(dim=1), label_logits)), axis).wait()
        counted = labels_T != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(sums[:, None]), columns, mine, counted)
        return ((sums.log() - label_logits) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, columns, mine, counted = ctx.saved_tensors
        dlogits = logits_grad(probabilities, columns, mine, counted * gradients[0])
        return dlogits, None, None


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Summed token loss of the output of a decoder or its last stage: logits if `takes_logits`, else hidden states."""

    model: Decoder
    chunks: int

    @property
    def takes_logits(self) -> bool:
        """True if the decoder computes the logits; else it returns the head's input, and the loss applies the head."""
        return self.chunks == 1

    def __call__(self, output: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the summed loss, an fp32 scalar, of logits [B, S, v] or of the head's input [B, s, H]."""
        if self.takes_logits:
            return self._logits_loss(output, labels_BS)
        return self.from_hidden(output, labels_BS)

    def from_hidden(self, x_BsH: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the summed loss, an fp32 scalar, of the head's input [B, s, H]."""
        tp_region, head = self.model.tp_region, self.model.head
        assert head is not None, "only the last stage knows a loss"
        if self.chunks == 1:
            (logits_BSv,) = tp_region.column_parallel_linear(x_BsH, head)
            return self._logits_loss(self.model.softcap_logits(logits_BSv), labels_BS)
        x_TH = tp_region.gather_from_sequence_parallel_region(x_BsH).flatten(0, 1)
        weight_vH = tp_region.local_param(head.weight, head.layout)
        loss = apply_function(
            _ChunkedLinearCrossEntropy,
            x_TH,
            weight_vH,
            labels_BS.flatten(),
            self._chunk_loss,
            self.chunks,
            torch.is_grad_enabled(),
        )
        return loss

    def _chunk_loss(self, logits_Cv: Tensor, labels_C: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
        """Return a chunk's loss and, if it learns, the gradient of its logits; both may overwrite the logits."""
        model = self.model
        kernels = loss_kernels(logits_Cv)
        if kernels is not None:
            axis, cap = model.tp_region.vocab_axis, model.config.final_logit_softcapping
            return _fused_loss(kernels, logits_Cv, labels_C, axis, model.vocabulary_columns, cap, learns), logits_Cv
        logits_Cv.requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            loss = self._logits_loss(model.softcap_logits(logits_Cv)[None], labels_C[None])
        return loss.detach(), torch.autograd.grad(loss, logits_Cv)[0] if learns else logits_Cv

    def _logits_loss(self, logits_BSv: Tensor, labels_BS: Tensor) -> Tensor:
        model = self.model
        axis, used = model.tp_region.vocab_axis, model.vocabulary_columns
        kernels = loss_kernels(logits_BSv)
        if kernels is None:
            return cross_entropy_sum(logits_BSv, labels_BS, axis, used)
        logits_Tv, labels_T = logits_BSv.flatten(0, 1), labels_BS.flatten()
        return apply_function(_FusedCrossEntropy, logits_Tv, labels_T, kernels, axis, used)


class _FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy by kernels from logits in the compute dtype, of which no copy in fp32 exists.

    As `_VocabParallelCrossEntropy`, but the logits are saved for backward, which overwrites them by their gradient:
    with the incoming gradient known, a loss scale of fp16 multiplies before the gradient is rounded.
    """

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, labels_T: Tensor, kernels: LossKernels, axis: Axis, used: int) -> Tensor:
        columns = _label_columns(labels_T, logits_Tv.shape[1], axis)
        log_sums, label_logits = _fused_sums(kernels, logits_Tv, columns, axis, used, None)
        counted = labels_T != IGNORE_INDEX
        ctx.save_for_backward(logits_Tv, columns, log_sums, counted)
        ctx.kernels, ctx.used = kernels, used
        return ((log_sums - label_logits) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_Tv, columns, log_sums, counted = ctx.saved_tensors
        dlogits = logits_Tv.detach()
        ctx.kernels.write_gradient(dlogits, columns, log_sums, counted * gradients[0], ctx.used, None)
        return dlogits, None, None, None, None


def _label_columns(labels: Tensor, width: int, axis: Axis) -> Tensor:
    """Return the column of each label in this rank's shard of `width` columns, -1 where there is none."""
    columns = labels - axis.rank * width
    return columns.where((columns >= 0) & (columns < width), -1)  # ignored labels are negative


def _fused_sums(
    kernels: LossKernels, logits_Tv: Tensor, columns_T: Tensor, axis: Axis, used: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return log(sum_v exp(z_v)) over all ranks' columns, and the label's z, both fp32 [T].

    m, s, z_label as in `_VocabParallelCrossEntropy`, but each rank sums exp(z_v - m_own), and multiplies the sum by
    exp(m_own - m).
    """
    own_largest, own_sums, own_label_logits = kernels.sums(logits_Tv, columns_T, used, cap)
    if axis.size == 1:
        return own_largest + own_sums.log(), own_label_logits
    largest = all_reduce_max(own_largest, axis)
    parts = torch.stack((own_sums * (own_largest - largest).exp(), own_label_logits))
    sums, label_logits = all_reduce_async(parts, axis).wait()
    return largest + sums.log(), label_logits


def _fused_loss(
    kernels: LossKernels,
    logits_Cv: Tensor,
    labels_C: Tensor,
    axis: Axis,
    used: int,
    cap: float | None,
    learns: bool,
) -> Tensor:
    """Return the summed loss of a chunk by kernels; if it learns, overwrite the logits by their gradient.

    One rank needs no collective between loss and gradient, which are then one kernel.

    Args:
        kernels: The kernels.
        logits_Cv: Logits of the matmul's dtype, without the cap.
        labels_C: Token ids, or IGNORE_INDEX.
        axis: The axis that shards the vocabulary.
        used: Number of columns of this rank that belong to tokens.
        cap: The soft cap of the logits, None: none.
        learns: Whether the gradient is needed.
    """
    columns = _label_columns(labels_C, logits_Cv.shape[1], axis)
    if axis.size == 1 and learns:
        return kernels.loss_and_gradient(logits_Cv, columns, used, cap).sum()
    log_sums, label_logits = _fused_sums(kernels, logits_Cv, columns, axis, used, cap)
    counted = (labels_C != IGNORE_INDEX).float()
    if learns:
        kernels.write_gradient(logits_Cv, columns, log_sums, counted, used, cap)
    return ((log_sums - label_logits) * counted).sum()


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Chunked linear cross-entropy. x_c are the tokens of chunk c, W is this rank's shard of the head.

    Forward:   loss = sum_c loss_of(z_c),  z_c = x_c W^T;  dz_c = d loss_of(z_c) / d z_c,
               dx_c = dz_c W,  dW = sum_c dz_c^T x_c
    Backward:  both scaled by the incoming gradient: dx * dloss,  dW * dloss

    Both gradients are computed in forward, while the chunk's logits exist, so that no logits are recomputed in backward
    (as in Liger's fused loss, Hsu et al. 2024). Saved for backward: dx and dW, as large as x and W. dW is summed in
    fp32 and rounded to W's dtype after the last chunk, so that its error does not grow with the number of chunks; in
    blocks of `SUM_ROWS` rows, so that all of it never exists in both dtypes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_vH: Tensor,
        labels_T: Tensor,
        loss_of: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]],
        chunks: int,
        learns: bool,
    ) -> Tensor:
        size = -(-x_TH.shape[0] // chunks)
        total = torch.zeros((), device=x_TH.device)
        if not learns:
            for x_CH, labels_C in zip(torch.split(x_TH, size), torch.split(labels_T, size), strict=True):
                total += loss_of(F.linear(x_CH, weight_vH), labels_C, False)[0]
            return total
        dx_TH = torch.empty_like(x_TH)
        sums = [torch.zeros_like(rows, dtype=torch.float32) for rows in torch.split(weight_vH, SUM_ROWS)]
        for x_CH, labels_C, dx_CH in zip(*(torch.split(each, size) for each in (x_TH, labels_T, dx_TH)), strict=True):
            loss, dlogits_Cv = loss_of(F.linear(x_CH, weight_vH), labels_C, True)
            total += loss
            torch.mm(dlogits_Cv, weight_vH, out=dx_CH)
            for sum_RH, dlogits_CR in zip(sums, torch.split(dlogits_Cv, SUM_ROWS, dim=1), strict=True):
                _add_product(sum_RH, dlogits_CR.T, x_CH)
            del dlogits_Cv, dlogits_CR  # free them before the next chunk's logits are allocated
        ctx.save_for_backward(dx_TH, *_rounded(sums, weight_vH.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, *blocks = ctx.saved_tensors
        dweight_vH = blocks[0].new_empty(sum(block.shape[0] for block in blocks), dx_TH.shape[1])
        for block, rows in zip(blocks, torch.split(dweight_vH, SUM_ROWS), strict=True):
            torch.mul(block, gradients[0], out=rows)
        return dx_TH * gradients[0], dweight_vH, None, None, None, None


def _add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add the matrix product a b to an fp32 sum. A product of narrower inputs is rounded once, to their dtype."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        sum_MN += a_MK @ b_KN


def _rounded(sums: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the sums in a dtype, and empty the list, to free each as soon as it is rounded."""
    sums.reverse()
    return [sums.pop().to(dtype) for _ in range(len(sums))]
