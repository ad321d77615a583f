"""The Triton kernels of norms (add_norm.py, fused_norm.py); imported only where Triton is installed and they are used.

In forward a program computes one row. In backward it computes every n-th of n programs, and its part of the gradients
of weight and bias; the parts are then summed by torch, in one order.
Shapes: R rows, H features, P programs. Arithmetic in fp32, or in fp64 if an input is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_ON_CPU = 4  # in Triton's interpreter


@triton.jit
def _forward(
    x_ptr,
    update_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    normed_ptr,
    mean_ptr,
    inverse_ptr,
    x_stride,
    update_stride,
    width,
    epsilon,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(WIDE)
    if update_ptr is not None:
        wide += tl.load(update_ptr + row * update_stride + at, mask=inside, other=0.0).to(WIDE)
        total = wide.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, total, mask=inside)
        wide = total.to(WIDE)  # the norm is that of the rounded sum, which backward reads again
    if bias_ptr is not None:
        mean = tl.sum(wide) / width
        tl.store(mean_ptr + row, mean)
        wide = tl.where(inside, wide - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + epsilon)
    tl.store(inverse_ptr + row, inverse)
    normed = wide * inverse * tl.load(weight_ptr + at, mask=inside, other=0.0).to(WIDE)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + at, mask=inside, other=0.0).to(WIDE)
    tl.store(normed_ptr + row * width + at, normed, mask=inside)


@triton.jit
def _backward(
    d_sum_ptr,
    d_normed_ptr,
    sum_ptr,
    weight_ptr,
    mean_ptr,
    inverse_ptr,
    d_ptr,
    d_weights_ptr,
    d_biases_ptr,
    d_sum_stride,
    d_normed_stride,
    rows,
    width,
    rows_per_program,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    in_row = at < width
    weight = tl.load(weight_ptr + at, mask=in_row, other=0.0).to(WIDE)
    d_weight, d_bias = tl.zeros((BLOCK,), dtype=WIDE), tl.zeros((BLOCK,), dtype=WIDE)
    for turn in range(0, rows_per_program):
        row = program + turn * programs
        inside = in_row & (row < rows)
        normed = tl.load(sum_ptr + row * width + at, mask=inside, other=0.0).to(WIDE)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0).to(WIDE)
        if d_biases_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(WIDE)
            normed -= mean  # where there is no feature, d_normed is 0
        normed *= inverse
        d_normed = tl.load(d_normed_ptr + row * d_normed_stride + at, mask=inside, other=0.0).to(WIDE)
        d_weight += d_normed * normed
        d_bias += d_normed
        d_normed *= weight
        d = d_normed - normed * (tl.sum(d_normed * normed) / width)
        if d_biases_ptr is not None:
            d -= tl.sum(d_normed) / width
        d *= inverse
        if d_sum_ptr is not None:
            d += tl.load(d_sum_ptr + row * d_sum_stride + at, mask=inside, other=0.0).to(WIDE)
        tl.store(d_ptr + row * width + at, d, mask=inside)
    tl.store(d_weights_ptr + program * width + at, d_weight, mask=in_row)
    if d_biases_ptr is not None:
        tl.store(d_biases_ptr + program * width + at, d_bias, mask=in_row)


def forward(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    total: Tensor | None,
    normed: Tensor,
    mean: Tensor,
    inverse: Tensor,
) -> None:
    """Write x + update (None: the norm is that of x), its norm, and of each row the mean and 1 / rms or deviation."""
    if normed.numel():
        x_RH, update_RH = _rows(x), None if update is None else _rows(update)
        block = triton.next_power_of_2(x.shape[-1])
        _forward[(x_RH.shape[0],)](
            x_RH,
            update_RH,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            total,
            normed,
            mean,
            inverse,
            x_RH.stride(0),
            0 if update_RH is None else update_RH.stride(0),
            x.shape[-1],
            epsilon,
            WIDE=_TRITON[inverse.dtype],
            BLOCK=block,
            num_warps=_warps(block),
        )


def backward(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, mean: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the sum, in its dtype, and of weight and bias (None without a mean) in fp32 or fp64.

    Args:
        d_total: The gradient of the sum by what else reads it; None: nothing does.
        d_normed: The gradient of the norm.
        total: The sum.
        weight: The weight.
        mean, inverse: Of each row, as `forward` returns them.
    """
    width, rows, wide, total = total.shape[-1], inverse.shape[0], inverse.dtype, total.contiguous()
    d = torch.empty_like(total)
    block = triton.next_power_of_2(max(width, 1))
    programs = min(rows, _most_programs(total.device, block))
    d_weights = torch.zeros(max(programs, 1), width, dtype=wide, device=total.device)
    d_biases = None if mean is None else torch.zeros_like(d_weights)
    if total.numel():
        d_total_RH, d_normed_RH = None if d_total is None else _rows(d_total), _rows(d_normed)
        _backward[(programs,)](
            d_total_RH,
            d_normed_RH,
            total,
            weight.contiguous(),
            mean,
            inverse,
            d,
            d_weights,
            d_biases,
            0 if d_total_RH is None else d_total_RH.stride(0),
            d_normed_RH.stride(0),
            rows,
            width,
            triton.cdiv(rows, programs),
            WIDE=_TRITON[wide],
            BLOCK=block,
            num_warps=_warps(block),
        )
    return d, d_weights.sum(0), None if d_biases is None else d_biases.sum(0)


_TRITON = {torch.float32: tl.float32, torch.float64: tl.float64}


def _rows(x: Tensor) -> Tensor:
    """Return x as [R, H] whose features are adjacent in memory; a view if it can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


def _most_programs(device: torch.device, block: int) -> int:
    """Return enough programs to fill the device: each holds `block` numbers of a few tensors in registers."""
    if device.type == "cpu":
        return _PROGRAMS_ON_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count * max(8192 // block, 1)
