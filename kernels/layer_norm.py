"""LayerNorm over the last dim: torch's operator, and the Triton kernel (fused_norm.py).

Source: Ba et al. 2016, "Layer Normalization".
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.fused_norm import norm_fused, uses_norm_kernel


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return (x - mean(x)) / std(x) * weight + bias, in the dtype of all, by the fastest form for the device."""
    if uses_norm_kernel(x):
        return norm_fused(x, weight, bias, epsilon)
    return layer_norm_reference(x, weight, bias, epsilon)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Compute LayerNorm by torch's operator."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)
