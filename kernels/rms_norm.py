"""RMSNorm, x / rms(x) * weight over the last dim: torch's operator, a Triton kernel (fused_norm.py) and a CPU form.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import kernel_forms
from megalaunch.kernels.fused_norm import norm_fused, uses_norm_kernel
from megalaunch.kernels.overridable import overridable


@overridable
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x) * weight, [..., H] -> [..., H] in the dtype of x, by the fastest form for the device."""
    form = kernel_forms().rms_norm
    if form is not None:
        return form(x, weight, epsilon)
    if x.is_cpu and not torch.compiler.is_compiling():
        return rms_norm_row(x, weight, epsilon) if _is_decoded_row(x) else rms_norm_cpu(x, weight, epsilon)
    if uses_norm_kernel(x):
        return rms_norm_fused(x, weight, epsilon)
    return rms_norm_reference(x, weight, epsilon)


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm by torch's operator, one kernel on a GPU and ten passes over memory on a CPU."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rms_norm_fused(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm by the Triton kernels."""
    return norm_fused(x, weight, None, epsilon)


def rms_norm_cpu(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm in few passes over memory."""
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon, None)
    return normed


def rms_norm_sharded(x: Tensor, weight: Tensor, epsilon: float, all_reduce_mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute RMSNorm over features of which every rank has an equal shard, [..., f] -> [..., f].

    It saves x in its own dtype, where autograd would save two copies in fp32.

    Args:
        all_reduce_mean: averages a statistic [..., 1] over the ranks; called in forward and in backward.
    """
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon, all_reduce_mean)
    return normed


def rms_norm_row(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm of a single row in fp32 without a gradient, by three operators instead of seven."""
    row = x.flatten()
    mean = torch.dot(row, row).item() / row.shape[0]
    return torch.mul(x, weight).mul_((mean + epsilon) ** -0.5)


def _is_decoded_row(x: Tensor) -> bool:
    """Return whether x is the hidden state of one new token in generation."""
    return torch.is_inference_mode_enabled() and x.numel() == x.shape[-1] and x.dtype == torch.float32


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves x and, for each row, r = 1 / rms(x) in fp32.

    Forward:   y = x r w
    Backward:  dw = sum over rows of dy x r,  dx = dy w r - x r^3 mean(dy w x)
    Both means are over the features of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, all_reduce_mean: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        wide = x.float()
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        if all_reduce_mean is not None:
            squares = all_reduce_mean(squares)
        inverse = (squares + epsilon).rsqrt_()
        ctx.all_reduce_mean = all_reduce_mean
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        dy, wide, factor = gradients[0].float(), x.float(), weight.float()
        products = (dy * wide).flatten(0, -2)  # dy x; sums over rows give dw, over features the mean in dx
        dweight = inverse.flatten() @ products
        share = (products @ factor).view_as(inverse).mul_(inverse.pow(3)).div_(x.shape[-1])
        if ctx.all_reduce_mean is not None:
            share = ctx.all_reduce_mean(share)
        dx = torch.mul(dy, factor, out=products.view_as(dy)).mul_(inverse).addcmul_(wide, share, value=-1)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None
