"""SwiGLU's elementwise half, silu(gate) * up: the plain-torch reference, the Triton kernel and a processor's form.

Plain torch keeps three activations for the backward pass (gate, up, silu(gate)); the kernel keeps two and reads
and writes each value once. Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, *, spend: bool = False) -> Tensor:
    """silu(gate) * up, elementwise, of the shape and dtype of both: each device in its fastest way.

    `spend`: the backward pass may write over `up` in fp32, since nobody reads it afterwards.
    """
    if gate.is_cuda and _has_triton():
        return swiglu_fused(gate, up)
    if gate.is_cpu and gate.requires_grad and not torch.compiler.is_compiling():
        return swiglu_in_place(gate, up, spend)
    return swiglu_reference(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """What every other implementation is held to."""
    return F.silu(gate) * up


def swiglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    """The Triton kernel, with its own backward pass; arithmetic in fp32 whatever the dtype."""
    return _FusedSwiglu.apply(gate.contiguous(), up.contiguous())


def swiglu_in_place(gate: Tensor, up: Tensor, spend: bool) -> Tensor:
    """The reference's arithmetic; gradients take the place of what it keeps, since a processor waits for new memory."""
    return _InPlaceSwiglu.apply(gate, up, spend)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class _FusedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from megalaunch.kernels.swiglu_triton import forward

        ctx.save_for_backward(gate, up)
        return forward(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        from megalaunch.kernels.swiglu_triton import backward

        gate, up = ctx.saved_tensors
        return backward(gradients[0].contiguous(), gate, up)


class _InPlaceSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, spend: bool) -> Tensor:
        silu = F.silu(gate)
        ctx.save_for_backward(gate, up, silu)
        ctx.spend = spend
        return silu * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, silu = ctx.saved_tensors
        in_place = silu.dtype == torch.float32  # torch's products in place take twice as long in 16 bits
        dsilu = up.mul_(gradients[0]) if in_place and ctx.spend else gradients[0] * up
        dgate = torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=dsilu)
        return dgate, silu.mul_(gradients[0]) if in_place else silu * gradients[0], None
