"""The elementwise part of SwiGLU, silu(gate) * up: the plain-torch reference, a Triton kernel and an in-place CPU form.

Plain torch saves three activations for backward (gate, up, silu(gate)); the kernel saves two, and reads and writes each
value once. Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import kernel_forms, on_cpu, uses_triton
from megalaunch.kernels.overridable import overridable


@overridable
def swiglu(gate: Tensor, up: Tensor, *, overwrite_up: bool = False) -> Tensor:
    """Return silu(gate) * up, elementwise, by the fastest implementation for the device.

    Args:
        gate: The gate, of the shape and dtype of `up` and the result.
        up: The values that are gated.
        overwrite_up: Nothing reads `up` after the backward pass, which may overwrite it in fp32.
    """
    form = kernel_forms().swiglu
    if form is not None:
        return form(gate, up)
    if uses_triton(gate):
        return swiglu_fused(gate, up)
    if on_cpu(gate) and gate.requires_grad and not torch.compiler.is_compiling():
        return swiglu_in_place(gate, up, overwrite_up)
    return swiglu_reference(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU in plain torch, the reference for the other implementations."""
    return F.silu(gate) * up


def swiglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU with the Triton kernels for forward and backward, in fp32 arithmetic whatever the dtype."""
    from megalaunch.kernels import operators

    gated: Tensor = operators.swiglu(gate, up)
    return gated


def swiglu_in_place(gate: Tensor, up: Tensor, overwrite_up: bool) -> Tensor:
    """Compute SwiGLU as the reference does; backward overwrites the saved tensors, as new memory is slow on a CPU."""
    return _InPlaceSwiglu.apply(gate, up, overwrite_up)


class _InPlaceSwiglu(torch.autograd.Function):
    """SwiGLU that saves gate, up and silu(gate); in fp32 backward overwrites silu(gate), and up if `overwrite_up`.

    Forward:   y = silu(gate) up
    Backward:  dgate = dy up silu'(gate),  dup = dy silu(gate)
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite_up: bool) -> Tensor:
        silu = F.silu(gate)
        ctx.save_for_backward(gate, up, silu)
        ctx.overwrite_up = overwrite_up
        return silu * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, silu = ctx.saved_tensors
        in_place = silu.dtype == torch.float32  # torch's in-place products take twice as long in 16 bits
        dsilu = up.mul_(gradients[0]) if in_place and ctx.overwrite_up else gradients[0] * up
        dgate = torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=dsilu)
        return dgate, silu.mul_(gradients[0]) if in_place else silu * gradients[0], None
