"""The one loss rule: summed token losses divided by the global number of valid tokens, before backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.collectives import all_reduce_async, all_reduce_max
from megalaunch.engine.mesh import Axis

IGNORE_INDEX = -100  # label of a position that has no loss


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor, vocabulary: Axis, columns: int | None = None) -> Tensor:
    """Sum of the cross-entropies of all labels that are not IGNORED, in fp32 nats: a scalar.

    Where the axis divides the vocabulary, each rank gives the logits of its part and gets the whole loss. Only the
    first `columns` of a rank (None: all) are those of tokens; the others are padding, and count for nothing.
    The logits are used up: on a processor, what the backward pass needs takes their place.
    """
    logits, labels = logits_BSV.float().flatten(0, 1), labels_BS.flatten()
    if columns is not None and columns < logits.shape[1]:
        logits.detach()[:, columns:] = -math.inf  # no probability, and so no gradient
    loss: Tensor
    if vocabulary.size > 1:
        loss = _VocabParallelCrossEntropy.apply(logits, labels, vocabulary)  # type: ignore[no-untyped-call]
    elif logits.is_cpu:
        loss = _CPUCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    else:
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss


class _CPUCrossEntropy(torch.autograd.Function):
    """On a processor: exponentials, then the gradient, take the place of the logits; torch fills it three times."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        counted = labels_T != IGNORE_INDEX
        columns = labels_T.where(counted, 0)[:, None]
        shifted = logits_TV.sub_(logits_TV.amax(dim=1, keepdim=True))
        label_logits = shifted.gather(1, columns)[:, 0]
        exponentials = shifted.exp_()
        sums = exponentials.sum(dim=1)
        ctx.save_for_backward(exponentials, sums, columns, counted)
        return (sums.log() - label_logits).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exponentials, sums, columns, counted = ctx.saved_tensors
        share = counted * gradients[0]
        dlogits = exponentials.mul_((share / sums)[:, None])
        return dlogits.scatter_add_(1, columns, -share[:, None]), None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """log sum_v exp(z_v) - z_label over a divided vocabulary: a maximum and one sum of two numbers a token cross.

    On a processor probabilities, then the gradient, take the place of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, labels_T: Tensor, axis: Axis) -> Tensor:
        width = logits_Tv.shape[1]
        largest = all_reduce_max(logits_Tv.amax(dim=1), axis)
        own = logits_Tv.detach()  # they may be a view of what another function gave, which torch would not let change
        shifted = own.sub_(largest[:, None]) if own.is_cpu else own - largest[:, None]
        columns = labels_T - axis.rank * width
        mine = (columns >= 0) & (columns < width)
        columns = columns.where(mine, 0)
        label_logits = shifted.gather(1, columns[:, None])[:, 0].where(mine, 0)  # not a product: padding is -inf
        exponentials = shifted.exp_()
        sums, label_logits = all_reduce_async(torch.stack((exponentials.sum(dim=1), label_logits)), axis).wait()
        counted = labels_T != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(sums[:, None]), columns, mine, counted)
        return ((sums.log() - label_logits) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, columns, mine, counted = ctx.saved_tensors
        share = (counted * gradients[0])[:, None]
        if probabilities.is_cpu:
            return probabilities.mul_(share).scatter_add_(1, columns[:, None], -share * mine[:, None]), None, None
        dlogits = probabilities.scatter_add(1, columns[:, None], -mine.to(probabilities.dtype)[:, None])
        return dlogits * share, None, None
