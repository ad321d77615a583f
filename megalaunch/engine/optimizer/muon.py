"""Muon (Jordan et al. 2024; for large models Liu et al. 2025, "Moonlight"): momentum, orthogonalized.

Per matrix W [out, in] with gradient G, momentum B, learning rate lr and scale s (`muon_scale_mode`):

B = momentum * B + G
D = G + momentum * B with Nesterov momentum, else B
W -= lr * s * orthogonalize(D)

`orthogonalize` needs the whole matrix, while D is sharded by tp, FSDP or etp. With n ranks that share a matrix, n
matrices are taken at a time: an all-to-all gives each rank a whole one, the next all-to-all returns the shards. So the
work is distributed, a rank holds one whole matrix at a time, and the update is that of one process. Larger matrices
come first: those taken together are alike, and ranks do not wait for the one with a larger matrix.

Each projection is a matrix of its own (q, k and v are stored apart, gate and up too), and so is each expert's. Routed
experts that are sharded by expert alone are orthogonalized where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.engine.mesh import Axis
from megalaunch.engine.optimizer.sharded_matrix import ShardedMatrix, gather_matrices, list_matrices, scatter_matrices
from megalaunch.engine.optimizer.update_rules import Update, decay_weights
from megalaunch.kernels.overridable import overridable
from megalaunch.schema.optimizer import OptimizerSpec

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al.: the steepest slope at 0 for which singular values end between about 0.7 and 1.2."""
_EPSILON = 1e-7  # of the norm of a matrix of zeros


class Muon:
    """Muon on local shards of matrices, and of stacks of matrices (experts) [E, out, in]."""

    state_names = ("momentum_buffer",)

    def __init__(self, spec: OptimizerSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype

    def apply(self, update: Update) -> None:
        """Update parameters and momentum; gradients are overwritten with the directions D. Collective."""
        self._to_directions(update)
        for matrices in _by_axes(update):
            ranks = matrices[0].num_ranks
            for start in range(0, len(matrices), ranks):
                self._update(matrices[start : start + ranks], update)

    def _to_directions(self, update: Update) -> None:
        """Update the momentum; replace each gradient by its direction."""
        momentum = self._spec.momentum
        for gradient, buffer in zip(update.gradient_shards(), update.shards("momentum_buffer"), strict=True):
            gradient.div_(update.divisor)
            buffer.mul_(momentum).add_(gradient)
            if self._spec.nesterov:
                gradient.add_(buffer, alpha=momentum)
            else:
                gradient.copy_(buffer)

    def _update(self, matrices: Sequence[ShardedMatrix], update: Update) -> None:
        """Orthogonalize the directions of one batch, each on the rank that gets it, and update the weights.

        A weight in bf16 is decayed and moved in fp32, and rounded once.
        """
        whole = gather_matrices(matrices, self._dtype)
        whole = [orthogonalize(matrix, self._spec.muon_num_ns_steps) for matrix in whole]
        for matrix, shard in zip(matrices, scatter_matrices(whole, matrices, self._dtype), strict=True):
            weight = matrix.weight.float()
            decay_weights([weight], update)
            weight.add_(shard, alpha=-update.learning_rate * self._scale(*matrix.shape))
            if weight is not matrix.weight:
                matrix.weight.copy_(weight)

    def _scale(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate for a matrix [rows, columns]."""
        squares = {
            "spectral": max(rows, columns),
            "shape_scaling": max(1.0, rows / columns),
            "unit_rms_norm": rows / columns,
        }
        return self._spec.muon_extra_scale_factor * math.sqrt(squares[self._spec.muon_scale_mode])


@overridable
def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by a Newton-Schulz iteration in the matrix's dtype.

    x -> a x + (b g + c g^2) x with g = x x^T, from x = matrix / ||matrix||, on the side that makes g small.
    """
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _by_axes(update: Update) -> list[list[ShardedMatrix]]:
    """Return the matrices of the parameters, those together that the same ranks share, the largest first.

    Their values are the directions.
    """
    found: dict[tuple[Axis, ...], list[ShardedMatrix]] = {}
    for parameter, gradient in zip(update.parameters, update.gradients, strict=True):
        for matrix in list_matrices(parameter, gradient):
            found.setdefault(matrix.axes, []).append(matrix)
    return [sorted(matrices, key=_work, reverse=True) for matrices in found.values()]


def _work(matrix: ShardedMatrix) -> int:
    """Return the multiplications of a Newton-Schulz iteration, up to a factor."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)
