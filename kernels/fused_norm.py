"""RMSNorm and LayerNorm by Triton kernels: where they run, and the norm without an addition.

The kernels are those of add_norm.py. A norm reads its input once each way and keeps for backward the input and one or
two numbers of each row, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.kernels.forms import prescribes_forms, uses_triton

_WIDEST = 16384  # features that a program of the Triton kernels holds


def uses_norm_kernel(x: Tensor) -> bool:
    """Return whether to normalize by the kernels; torch.compile joins a norm with what surrounds it itself."""
    if prescribes_forms() or torch.compiler.is_compiling():
        return False
    return uses_triton(x) and x.shape[-1] <= _WIDEST


def norm_fused(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the norm of [..., H] in the dtype of x, by kernels for forward and backward with fp32 arithmetic.

    Args:
        x: What is normalized.
        weight: The weight [H], of any dtype.
        bias: The bias [H] of a LayerNorm; None: RMSNorm.
        epsilon: The norm's epsilon.
    """
    from megalaunch.kernels import operators

    normed: Tensor = operators.norm(x, weight, bias, epsilon)[0]
    return normed
