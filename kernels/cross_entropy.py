"""Cross-entropy of logits, summed over tokens: torch's operator, and forms that overwrite the logits on a CPU.

New memory is slow on a CPU, so that there each step writes over a tensor that nothing else reads. The vocab-parallel
loss (engine/train/loss.py) is made of `subtract_max` and `logits_grad`, with collectives between them.
Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import on_cpu
from megalaunch.kernels.overridable import overridable


@overridable
def cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignore_index: int) -> Tensor:
    """Sum the cross-entropies of all labels other than `ignore_index`, in nats. May overwrite the logits."""
    if on_cpu(logits_TV):
        return cross_entropy_in_place(logits_TV, labels_T, ignore_index)
    return cross_entropy_reference(logits_TV, labels_T, ignore_index)


def cross_entropy_reference(logits_TV: Tensor, labels_T: Tensor, ignore_index: int) -> Tensor:
    """Sum the cross-entropies by torch's operator."""
    return F.cross_entropy(logits_TV, labels_T, ignore_index=ignore_index, reduction="sum")


def cross_entropy_in_place(logits_TV: Tensor, labels_T: Tensor, ignore_index: int) -> Tensor:
    """Sum the cross-entropies; the tensor saved for backward, and then the gradient, overwrite the logits."""
    loss: Tensor = _InPlaceCrossEntropy.apply(logits_TV, labels_T, ignore_index)
    return loss


def subtract_max(logits_TV: Tensor, max_T: Tensor) -> Tensor:
    """Return z - m, from logits z without a gradient and the maximum m of each row; on a CPU it overwrites z."""
    return logits_TV.sub_(max_T[:, None]) if on_cpu(logits_TV) else logits_TV - max_T[:, None]


def logits_grad(probabilities_TV: Tensor, columns_T: Tensor, has_label_T: Tensor, dloss_T: Tensor) -> Tensor:
    """Return the gradient of the logits, dz_v = (p_v - [v = label]) * dloss; on a CPU it overwrites p.

    Args:
        probabilities_TV: p, the softmax of the logits; or this rank's columns of it.
        columns_T: The column of each token's label.
        has_label_T: True where that column exists here; elsewhere the label is in another rank's shard.
        dloss_T: The gradient of each token's loss; 0 for ignored labels.
    """
    columns, dloss = columns_T[:, None], dloss_T[:, None]
    if on_cpu(probabilities_TV):
        return probabilities_TV.mul_(dloss).scatter_add_(1, columns, -dloss * has_label_T[:, None])
    return probabilities_TV.scatter_add(1, columns, -has_label_T.to(probabilities_TV.dtype)[:, None]) * dloss


class _InPlaceCrossEntropy(torch.autograd.Function):
    """In-place cross-entropy.

    Forward:   loss = sum_t log(sum_v e_tv) - (z_t,label - m_t),  e_tv = exp(z_tv - m_t),  m_t = max_v z_tv
    Backward:  dz_tv = (e_tv / sum_v e_tv - [v = label]) * dloss, and 0 for ignored labels

    e and dz overwrite the logits, while torch's cross-entropy writes three tensors of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, ignore_index: int) -> Tensor:
        counted = labels_T != ignore_index
        columns = labels_T.where(counted, 0)[:, None]
        shifted = logits_TV.sub_(logits_TV.amax(dim=1, keepdim=True))
        label_logits = shifted.gather(1, columns)[:, 0]
        exponentials = shifted.exp_()
        sums = exponentials.sum(dim=1)
        ctx.save_for_backward(exponentials, sums, columns, counted)
        return (sums.log() - label_logits).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exponentials, sums, columns, counted = ctx.saved_tensors
        dloss = counted * gradients[0]
        dlogits = exponentials.mul_((dloss / sums)[:, None])
        return dlogits.scatter_add_(1, columns, -dloss[:, None]), None, None
