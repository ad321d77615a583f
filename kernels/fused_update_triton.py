"""The Triton kernels of fused_update.py; imported only where Triton is installed and the kernels are used.

One launch updates many tensors: a table on the device has their addresses and sizes, and the number of blocks before
each tensor, in which a program finds its own by bisection. Arithmetic in fp32; each result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements per program
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _find_block(table_ptr, tensors, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return which tensor this program updates, its elements, and which of them exist.

    The first two rows of the table are the number of blocks before each tensor, and its size.
    """
    program = tl.program_id(0)
    low, high = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + tensors
    while high - low > 1:  # blocks before `low` <= program < blocks before `high`
        middle = (low + high) // 2
        after = tl.load(table_ptr + middle) <= program
        low, high = tl.where(after, middle, low), tl.where(after, high, middle)
    at = (program - tl.load(table_ptr + low)) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(table_ptr + tensors + low)
    return low, at, at < (tl.multiple_of(size, 16) if ALIGNED else size)


@triton.jit
def _pointer(table_ptr, tensors, tensor, ROW: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Return the address of a tensor in a row of the table."""
    pointer = tl.load(table_ptr + (2 + ROW) * tensors + tensor).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _lerp(start, end, share):
    """Return start + share (end - start) as torch.lerp does, exact at both ends."""
    return tl.where(share < 0.5, start + share * (end - start), end - (end - start) * (1 - share))


@triton.jit
def _adamw(
    table_ptr, corrections_ptr, tensors, lr, share, beta2, square_share, epsilon, decay, divisor,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, AVERAGE: tl.constexpr, SQUARE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, at, inside = _find_block(table_ptr, tensors, ALIGNED, BLOCK)
    weight_ptr = _pointer(table_ptr, tensors, tensor, 0, ALIGNED, WEIGHT) + at
    gradient_ptr = _pointer(table_ptr, tensors, tensor, 1, ALIGNED, GRADIENT) + at
    average_ptr = _pointer(table_ptr, tensors, tensor, 2, ALIGNED, AVERAGE) + at
    square_ptr = _pointer(table_ptr, tensors, tensor, 3, ALIGNED, SQUARE) + at
    weight = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr, mask=inside, other=0.0).to(tl.float32) / divisor
    average = tl.load(average_ptr, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr, mask=inside, other=0.0).to(tl.float32)
    average = _lerp(average, gradient, share)
    square = beta2 * square + square_share * gradient * gradient
    step_size = lr / tl.load(corrections_ptr + tensor)
    root = tl.load(corrections_ptr + tensors + tensor)
    weight = weight - decay * weight - step_size * average / (tl.sqrt(square) / root + epsilon)
    tl.store(weight_ptr, weight, mask=inside)
    tl.store(average_ptr, average, mask=inside)
    tl.store(square_ptr, square, mask=inside)


@triton.jit
def _lion(
    table_ptr, tensors, lr, share, average_share, keep, divisor,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, AVERAGE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, at, inside = _find_block(table_ptr, tensors, ALIGNED, BLOCK)
    weight_ptr = _pointer(table_ptr, tensors, tensor, 0, ALIGNED, WEIGHT) + at
    gradient_ptr = _pointer(table_ptr, tensors, tensor, 1, ALIGNED, GRADIENT) + at
    average_ptr = _pointer(table_ptr, tensors, tensor, 2, ALIGNED, AVERAGE) + at
    weight = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr, mask=inside, other=0.0).to(tl.float32) / divisor
    average = tl.load(average_ptr, mask=inside, other=0.0).to(tl.float32)
    direction = _lerp(average, gradient, share)
    sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
    tl.store(weight_ptr, weight * keep - lr * sign, mask=inside)
    tl.store(average_ptr, _lerp(average, gradient, average_share), mask=inside)


def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """Update weights and moments by AdamW, and count the update (`UpdateKernels.adamw`)."""
    torch._foreach_add_(list(updates), 1.0)
    for chosen, ((weight, average, square), (gradient,)) in _dense_groups((weights, averages, squares), (gradients,)):
        counts = torch.stack([updates[index] for index in chosen]).double()
        corrections = torch.stack((1 - beta1**counts, (1 - beta2**counts).sqrt())).float()
        _start(
            _adamw, (weight, gradient, average, square), corrections,
            factors=(lr, 1 - beta1, beta2, 1 - beta2, epsilon, lr * weight_decay, divisor),
        )  # fmt: skip


def lion(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """Update weights and moments by Lion (`UpdateKernels.lion`)."""
    for _, ((weight, average), (gradient,)) in _dense_groups((weights, averages), (gradients,)):
        _start(_lion, (weight, gradient, average), factors=(lr, 1 - beta1, 1 - beta2, 1 - lr * weight_decay, divisor))


_Role = Sequence[Tensor]


def _dense_groups(
    written: tuple[_Role, ...], read: tuple[_Role, ...]
) -> Iterator[tuple[list[int], tuple[list[list[Tensor]], list[list[Tensor]]]]]:
    """Yield the numbers of the tensors with elements that have the same dtypes, and those tensors, contiguous.

    What the caller writes to copies of `written` is copied back.
    """
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, weight in enumerate(written[0]):
        if weight.numel():
            groups.setdefault(tuple(role[index].dtype for role in (*written, *read)), []).append(index)
    for chosen in groups.values():
        dense = [[[role[index].contiguous() for index in chosen] for role in roles] for roles in (written, read)]
        yield chosen, (dense[0], dense[1])
        for role, copies in zip(written, dense[0], strict=True):
            for index, copy in zip(chosen, copies, strict=True):
                if copy.data_ptr() != role[index].data_ptr():
                    role[index].copy_(copy)


def _start(kernel: Any, roles: tuple[_Role, ...], *tables: Tensor, factors: tuple[float, ...]) -> None:
    """Start the programs of one group: of weights, gradients and moments, in the order of the kernel's addresses."""
    sizes = [tensor.numel() for tensor in roles[0]]
    blocks = [triton.cdiv(size, _BLOCK) for size in sizes]
    before = [end - count for end, count in zip(accumulate(blocks), blocks, strict=True)]
    addresses = [[tensor.data_ptr() for tensor in role] for role in roles]
    table, device = torch.tensor([before, sizes, *addresses]), roles[0][0].device
    if device.type == "cuda":
        table = table.pin_memory()  # else the host would wait for the copy
    dtypes = (_DTYPES[role[0].dtype] for role in roles)
    is_aligned = all(number % 16 == 0 for row in (sizes, *addresses) for number in row)  # for loads of 16 bytes
    on_device = table.to(device, non_blocking=True)
    kernel[(sum(blocks),)](on_device, *tables, len(sizes), *factors, *dtypes, ALIGNED=is_aligned, BLOCK=_BLOCK)
