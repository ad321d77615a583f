"""The Triton kernels of permute.py; imported only where Triton is installed and the kernels are used.

A program computes one row, so that no two programs write to the same address, and sums have one order.
Shapes: T tokens, k experts per token, R rows, H hidden. Arithmetic in fp32, or in fp64 if an input is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # most elements of a row that a program handles at once


@triton.jit
def _gather(x_ptr, pairs_ptr, out_ptr, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    token = tl.load(pairs_ptr + row) // CHOICES
    tl.store(out_ptr + row * width + at, tl.load(x_ptr + token * width + at, mask=inside), mask=inside)


@triton.jit
def _sum(y_ptr, rows_ptr, weights_ptr, out_ptr, width, CHOICES: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), dtype=SUM)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        y = tl.load(y_ptr + tl.load(rows_ptr + pair) * width + at, mask=inside, other=0.0).to(SUM)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + pair).to(SUM)
        total += y
    tl.store(out_ptr + token * width + at, total, mask=inside)


@triton.jit
def _weigh(
    d_out_ptr,
    y_ptr,
    pairs_ptr,
    rows_ptr,
    weights_ptr,
    d_y_ptr,
    d_weights_ptr,
    width,
    CHOICES: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + row)
    token = pair // CHOICES
    weight = tl.load(weights_ptr + pair).to(SUM)
    products = tl.zeros((BLOCK,), dtype=SUM)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        d_out = tl.load(d_out_ptr + token * width + at, mask=inside, other=0.0).to(SUM)
        products += d_out * tl.load(y_ptr + row * width + at, mask=inside, other=0.0).to(SUM)
        tl.store(d_y_ptr + row * width + at, d_out * weight, mask=inside)
    # Padding rows name a pair whose own row is another one.
    tl.store(d_weights_ptr + pair, tl.sum(products), mask=tl.load(rows_ptr + pair) == row)


def gather_rows(x_TH: Tensor, pairs_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Return the token of each row, [T, H] -> [R, H]."""
    rows, (width, choices) = pairs_R.shape[0], (x_TH.shape[1], rows_Tk.shape[1])
    out_RH = x_TH.new_empty(rows, width)
    if out_RH.numel():
        block = _block(width)
        grid = rows, triton.cdiv(width, block)
        _gather[grid](x_TH.contiguous(), pairs_R, out_RH, width, CHOICES=choices, BLOCK=block)
    return out_RH


def sum_rows(y_RH: Tensor, rows_Tk: Tensor, weights_Tk: Tensor | None) -> Tensor:
    """Return the (weighted) sum of each token's rows, [R, H] -> [T, H], in the order of its experts."""
    (tokens, choices), width = rows_Tk.shape, y_RH.shape[1]
    out_TH = y_RH.new_empty(tokens, width)
    if out_TH.numel():
        block = _block(width)
        weights = None if weights_Tk is None else weights_Tk.contiguous()
        _sum[tokens, triton.cdiv(width, block)](
            y_RH.contiguous(),
            rows_Tk.contiguous(),
            weights,
            out_TH,
            width,
            CHOICES=choices,
            SUM=_sum_dtype(y_RH, weights),
            BLOCK=block,
        )
    return out_TH


def weigh_rows(
    dy_TH: Tensor, y_RH: Tensor, pairs_R: Tensor, rows_Tk: Tensor, weights_Tk: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows, w_r dy_t, and of weights, y_r . dy_t: each row is read once for both."""
    rows, width = y_RH.shape
    d_y, d_weights = y_RH.new_empty(rows, width), weights_Tk.new_zeros(weights_Tk.shape)  # contiguous
    if d_y.numel():
        _weigh[(rows,)](
            dy_TH.contiguous(),
            y_RH.contiguous(),
            pairs_R,
            rows_Tk.contiguous(),
            weights_Tk.contiguous(),
            d_y,
            d_weights,
            width,
            CHOICES=rows_Tk.shape[1],
            SUM=_sum_dtype(y_RH, weights_Tk),
            BLOCK=_block(width),
        )
    return d_y, d_weights


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def _sum_dtype(y_RH: Tensor, weights_Tk: Tensor | None) -> tl.dtype:
    doubles = y_RH.dtype == torch.float64 or (weights_Tk is not None and weights_Tk.dtype == torch.float64)
    return tl.float64 if doubles else tl.float32
