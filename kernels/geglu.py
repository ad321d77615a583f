"""The elementwise part of GEGLU, gelu(gate) * up, with three variants of GELU: plain-torch reference and Triton kernel.

Plain torch saves three activations for backward or more; the kernel saves gate and up, and reads and writes each value
once. Sources: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks and Gimpel 2016 (GELU and approximations).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import kernel_forms, uses_triton

GegluVariant = Literal["geglu", "geglu_tanh", "quick_geglu"]
"""The variants, by their names in `model.activation`."""

QUICK_GELU_SLOPE = 1.702
"""The factor of x in the approximation x * sigmoid(1.702 x)."""


def geglu(gate: Tensor, up: Tensor, variant: GegluVariant = "geglu") -> Tensor:
    """Return gelu(gate) * up, elementwise, by the fastest implementation for the device.

    Args:
        gate: The gate, of the shape and dtype of `up` and the result.
        up: The values that are gated.
        variant: The GELU: exact, with the tanh approximation, or as gate * sigmoid(1.702 gate), where up + 1 is gated.
    """
    form = kernel_forms().geglu
    if form is not None:
        return form(gate, up, variant)
    if uses_triton(gate) and not torch.compiler.is_compiling():  # the compiler joins the reference's operators itself
        return geglu_fused(gate, up, variant)
    return geglu_reference(gate, up, variant)


def geglu_reference(gate: Tensor, up: Tensor, variant: GegluVariant = "geglu") -> Tensor:
    """Compute GEGLU in plain torch, the reference for the kernel."""
    if variant == "quick_geglu":
        return quick_gelu(gate) * (up + 1)
    return F.gelu(gate, approximate="tanh" if variant == "geglu_tanh" else "none") * up


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), an approximation of GELU."""
    return x * (QUICK_GELU_SLOPE * x).sigmoid()


def geglu_fused(gate: Tensor, up: Tensor, variant: GegluVariant = "geglu") -> Tensor:
    """Compute GEGLU with the Triton kernels for forward and backward, in fp32 arithmetic whatever the dtype."""
    from megalaunch.kernels import operators

    gated: Tensor = operators.geglu(gate, up, variant)
    return gated
