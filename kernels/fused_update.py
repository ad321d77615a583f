"""Updates of weights and moments in any mix of fp32, bf16 and fp16, many tensors a launch, and where they run.

engine/optimizer/update_rules.py has the rules operator by operator, the reference: arithmetic in fp32, and each result
rounded once, to the nearest. torch's fused AdamW needs one dtype of weights, gradients and moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megalaunch.kernels.forms import UpdateKernels, kernel_forms, uses_triton

_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


def update_kernels(tensors: Sequence[Tensor]) -> UpdateKernels | None:
    """Return the kernels for the tensors of an update; None: there are none for their device or a dtype."""
    form = kernel_forms().update_kernels
    if not tensors:
        return None
    if form is not None:
        return form
    return triton_kernels() if all(uses_triton(each) and each.dtype in _TAKEN for each in tensors) else None


@cache
def triton_kernels() -> UpdateKernels:
    """Return the Triton form, which imports Triton when it runs."""
    from megalaunch.kernels import operators

    return UpdateKernels(operators.adamw, operators.lion)
