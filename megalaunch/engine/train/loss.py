"""Cross-entropy, summed over tokens: on one rank (kernels/cross_entropy.py) and vocab-parallel.

Each loss of a step is such a sum, divided by the global number of valid tokens before backward (forward_backward.py).
Shapes: B batch, S sequence, T tokens (B S), V vocabulary, v a rank's shard of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import all_reduce_async, all_reduce_max
from megalaunch.engine.mesh import Axis
from megalaunch.kernels.cross_entropy import cross_entropy, logits_grad, subtract_max

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
