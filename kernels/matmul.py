"""Matrix multiplication in the dtype that the device multiplies fastest.

A CPU without bf16 instructions takes twice as long for a matmul in bf16 as in fp32, and any CPU thirty times as long in
fp16; there the operands are converted to fp32 first. Both ways accumulate in fp32 and round once, so that only the
order of the sums differs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import on_cpu, prescribes_forms
from megalaunch.platform.detect import cpu_bf16_unit

_unit = cache(cpu_bf16_unit)
_ROWS = 64  # with fewer rows, converting the other matrix takes longer than is saved


def use_fp32_matmul(x: Tensor) -> bool:
    """Return whether to compute x times a matrix in fp32, by the dtype, device and number of rows of x.

    A simulated CPU has no bf16 instructions, whatever this one has: the planner knows none either.
    """
    if x.dtype == torch.float16:
        return on_cpu(x)
    narrow = x.dtype == torch.bfloat16 and on_cpu(x) and (prescribes_forms() or _unit() is None)
    return narrow and x.numel() >= _ROWS * x.shape[-1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [..., in], [out, in] -> [..., out]. Differentiable."""
    if not use_fp32_matmul(x):
        return F.linear(x, weight, bias)
    # A view is no leaf: for a leaf, `needs_grad` cannot tell whether a pass computes its gradient.
    projected: Tensor = _Fp32AccumLinear.apply(x, weight.view_as(weight))
    return projected if bias is None else projected + bias


def matmul(a: Tensor, b_KN: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return a b, or onto + a b: [..., K] -> [..., N]. For autograd functions, which define their own backward."""
    if not use_fp32_matmul(a):
        return a @ b_KN if onto is None else torch.addmm(onto.flatten(0, -2), a.flatten(0, -2), b_KN).view_as(onto)
    found = a.float() @ b_KN.float()
    return (found if onto is None else found.add_(onto)).to(a.dtype)


def needs_grad(ctx: Any, number: int) -> bool:
    """Return whether this backward pass computes the gradient of tensor input `number`; call it inside `backward`.

    Zero-bubble schedules compute input gradients first and weight gradients later, in two passes over one graph;
    `ctx.needs_input_grad` is the same in both: it says which gradients may be needed at all. A leaf passed to
    `torch.autograd.grad` cannot be distinguished from other leaves: the result is then True.
    """
    if torch.compiler.is_compiling():  # one graph for all passes
        return True
    node = ctx.next_functions[number][0]
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


class _Fp32AccumLinear(torch.autograd.Function):
    """Linear layer of 16-bit tensors that are converted to fp32 for each matmul, and saved for backward as they are.

    Forward:   y = x W^T
    Backward:  dx = dy W,  dW = dy^T x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy, dx, dweight = gradients[0].float(), None, None
        if needs_grad(ctx, 1):
            dweight = (dy.flatten(0, -2).T @ x.flatten(0, -2).float()).to(weight.dtype)
        if needs_grad(ctx, 0):
            dx = (dy @ weight.float()).to(x.dtype)
        return dx, dweight
