"""The Triton kernels of float8_grouped.py; imported only where Triton is installed and the kernels are used.

A program computes one tile of a product. It knows the expert of its rows from a table that is made on the device, so
that the host never waits for the numbers of rows. Tensor cores sum up the products of one block of columns; the scales
multiply these sums, and the products of different blocks are added in fp32 (DeepSeek-V3 report, section 3.3.2).
Shapes as in float8_grouped.py: R rows, E experts, K the dim that a product sums over, P padded rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megalaunch.kernels.grouped_linear import experts_of_rows

_TILE = 128  # rows and columns of a tile of the product, and columns of its operands that are read at a time
_WARPS = 8


@triton.jit
def _add_product(total, a, b, a_scales, b_scales, WIDTH: tl.constexpr, FAST: tl.constexpr, DEPTH: tl.constexpr):
    """Return total + a b, of a block of columns with its scales, or of columns that leave the scales to the end."""
    if WIDTH:
        return total + tl.dot(a, b) * (1.0 / a_scales)[:, None] * (1.0 / b_scales)[None, :]
    if FAST:
        return tl.dot(a, b, total)
    return tl.dot(a, b, total, max_num_imprecise_acc=DEPTH)


@triton.jit
def _rows_times_matrices(
    a_ptr, b_ptr, out_ptr, a_scales_ptr, b_scales_ptr, offsets_ptr, experts_ptr, first_rows_ptr,
    columns, depth, a_stride, b_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts_ptr + tl.program_id(1))
    end = tl.load(offsets_ptr + expert)
    m = tl.load(first_rows_ptr + tl.program_id(1)) + tl.arange(0, TILE)  # int64
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b_row = expert * columns + n
    has_row, has_column, k = m < end, n < columns, tl.arange(0, DEPTH)
    a_scale_ptr, b_scale_ptr = a_scales_ptr + m * a_stride, b_scales_ptr + b_row // HEIGHT * b_stride
    a_scales = tl.load(a_scale_ptr, mask=has_row, other=1.0)
    b_scales = tl.load(b_scale_ptr, mask=has_column, other=1.0)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, depth, DEPTH):
        at, inside = start + k, start + k < depth
        a = tl.load(a_ptr + m[:, None] * depth + at[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptr + b_row[None, :] * depth + at[:, None], mask=has_column[None, :] & inside[:, None], other=0.0)
        if WIDTH:
            a_scales = tl.load(a_scale_ptr + start // WIDTH, mask=has_row, other=1.0)
            b_scales = tl.load(b_scale_ptr + start // WIDTH, mask=has_column, other=1.0)
        total = _add_product(total, a, b, a_scales, b_scales, WIDTH, FAST, DEPTH)
    if WIDTH == 0:
        total = total * (1.0 / a_scales)[:, None] * (1.0 / b_scales)[None, :]
    tl.store(out_ptr + m[:, None] * columns + n[None, :], total, mask=has_row[:, None] & has_column[None, :])


@triton.jit
def _columns_times_rows(
    a_ptr, b_ptr, out_ptr, a_scales_ptr, b_scales_ptr, offsets_ptr,
    rows, columns, depth, a_stride, a_block_stride, b_stride, b_block_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    # Multiples of 16 elements, so that the loop can prefetch copies of 16 bytes.
    begin = tl.multiple_of(tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0), 16)
    end = tl.multiple_of(tl.load(offsets_ptr + expert), 16)
    m = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    has_row, has_column, p = m < rows, n < columns, tl.arange(0, DEPTH)
    a_scale_ptr, b_scale_ptr = a_scales_ptr + m * a_stride, b_scales_ptr + n * b_stride
    a_scales = tl.load(a_scale_ptr + expert * a_block_stride, mask=has_row, other=1.0)
    b_scales = tl.load(b_scale_ptr + expert * b_block_stride, mask=has_column, other=1.0)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(begin, end, DEPTH):
        at, inside = start + p, start + p < end
        a = tl.load(a_ptr + m[:, None] * depth + at[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptr + n[None, :] * depth + at[:, None], mask=has_column[None, :] & inside[:, None], other=0.0)
        if WIDTH:
            a_scales = tl.load(a_scale_ptr + start // WIDTH * a_block_stride, mask=has_row, other=1.0)
            b_scales = tl.load(b_scale_ptr + start // WIDTH * b_block_stride, mask=has_column, other=1.0)
        total = _add_product(total, a, b, a_scales, b_scales, WIDTH, False, DEPTH)
    if WIDTH == 0:
        total = total * (1.0 / a_scales)[:, None] * (1.0 / b_scales)[None, :]
    at_row = (expert * rows + m) * columns
    tl.store(out_ptr + at_row[:, None] + n[None, :], total, mask=has_row[:, None] & has_column[None, :])


def rows_times_matrices(
    a_RK: Tensor,
    a_scales: Tensor,
    b_NK: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    height: int,
    width: int,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Return a b_e^T, [R, K] x [E N, K] -> [R, N] (`float8_operators.float8_rows_times_matrices`)."""
    (rows, depth), experts = a_RK.shape, offsets_E.shape[0]
    columns = b_NK.shape[0] // experts
    out = torch.empty(rows, columns, dtype=dtype, device=a_RK.device)
    expert_of_tile, first_rows = _tiles(offsets_E, rows)
    _rows_times_matrices[(triton.cdiv(columns, _TILE), len(first_rows))](
        *(a_RK, b_NK, out, a_scales, b_scales, offsets_E, expert_of_tile, first_rows),
        *(columns, depth, a_scales.stride(0), b_scales.stride(0)),
        HEIGHT=height,
        WIDTH=width,
        FAST=fast,
        TILE=_TILE,
        DEPTH=width or _TILE,
        num_warps=_WARPS,
    )
    return out


def columns_times_rows(
    a_MP: Tensor,
    a_scales: Tensor,
    b_NP: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a_e b_e^T, [M, P] x [N, P] -> [E, M, N] (`float8_operators.float8_columns_times_rows`)."""
    (rows, depth), columns, experts = a_MP.shape, b_NP.shape[0], offsets_E.shape[0]
    out = torch.empty(experts, rows, columns, dtype=dtype, device=a_MP.device)
    _columns_times_rows[(triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE), experts)](
        *(a_MP, b_NP, out, a_scales, b_scales, offsets_E),
        *(rows, columns, depth, *a_scales.stride(), *b_scales.stride()),
        WIDTH=width,
        TILE=_TILE,
        DEPTH=width or _TILE,
        num_warps=_WARPS,
    )
    return out


def _tiles(offsets_E: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the expert and the first row of each tile, int64; tiles that no expert needs begin behind the last row."""
    experts = offsets_E.shape[0]
    starts_E = F.pad(offsets_E[:-1], (1, 0))
    tiles_E = (offsets_E - starts_E + _TILE - 1) // _TILE
    ends_E = tiles_E.cumsum(0)
    most = triton.cdiv(rows, _TILE) + experts
    expert_of_tile = experts_of_rows(ends_E, most)
    number = torch.arange(most, device=offsets_E.device) - (ends_E - tiles_E)[expert_of_tile]
    return expert_of_tile, starts_E[expert_of_tile] + number * _TILE
