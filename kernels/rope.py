"""Rotary position embedding of queries and keys together, by a Triton kernel with fp32 arithmetic.

engine/model/rope.py has the plain-torch reference. Source: Su et al. 2021, RoFormer. Gradients are rotated into new
memory: other functions may hold the tensor that backward is given, as those of an addition are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.kernels.forms import prescribes_forms, uses_triton


def fuses_rope(x: Tensor) -> bool:
    """Return whether to rotate by the kernel; torch.compile joins the reference's passes itself."""
    return not prescribes_forms() and not torch.compiler.is_compiling() and uses_triton(x)


def rope_fused(heads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Rotate pairs (i, i + R/2) of the first R features of one tensor [B, N, S, D], or of two, in one launch.

    Args:
        heads: Queries and keys, or either.
        cos, sin: Of each position's angles, [S, R] or [B, 1, S, R]; both halves of R are equal.
    """
    from megalaunch.kernels import operators

    return tuple(operators.rope(heads, cos, sin, 1))
