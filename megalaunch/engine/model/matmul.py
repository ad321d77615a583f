"""Products of matrices, in the format in which the device multiplies fastest.

A processor without a unit for bf16 takes twice as long over a product of bf16 matrices as over the same in fp32. There
they are widened first. Both ways sum in fp32 and round to bf16 once, so that only the order of the sums differs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.platform.detect import cpu_bf16_unit

_unit = cache(cpu_bf16_unit)
_ROWS = 64  # fewer do not make up for the time that it takes to widen the other matrix


def use_fp32_matmul(x: Tensor) -> bool:
    """Whether x times a matrix is to be computed in fp32, for its format, device and number of rows."""
    narrow = x.dtype == torch.bfloat16 and x.is_cpu and _unit() is None
    return narrow and x.numel() >= _ROWS * x.shape[-1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [..., in], [out, in] -> [..., out]; with gradients."""
    if not use_fp32_matmul(x):
        return F.linear(x, weight, bias)
    # A view, since a backward pass cannot tell whether it is run for a leaf (`needs_grad`).
    projected: Tensor = _Fp32AccumLinear.apply(x, weight.view_as(weight))  # type: ignore[no-untyped-call]
    return projected if bias is None else projected + bias


def matmul(a: Tensor, b_KN: Tensor, onto: Tensor | None = None) -> Tensor:
    """a b, or onto + a b: [..., K] -> [..., N]; inside functions that form their gradients themselves."""
    if not use_fp32_matmul(a):
        return a @ b_KN if onto is None else torch.addmm(onto.flatten(0, -2), a.flatten(0, -2), b_KN).view_as(onto)
    found = a.float() @ b_KN.float()
    return (found if onto is None else found.add_(onto)).to(a.dtype)


def needs_grad(ctx: Any, number: int) -> bool:
    """Inside a backward function: whether this pass needs the gradient of the tensor input of this number.

    Zero-bubble schedules ask for the inputs' gradients first and for those of weights later, in two passes over one
    graph. `ctx.needs_input_grad` says in both which gradients could be asked for at all. A leaf that
    `torch.autograd.grad` is called for cannot be told from others: it is taken as wanted.
    """
    if torch.compiler.is_compiling():  # one graph for all passes
        return True
    node = ctx.next_functions[number][0]
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


class _Fp32AccumLinear(torch.autograd.Function):
    """x W^T of matrices that are widened for each product, and kept as they are."""

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
