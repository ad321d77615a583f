"""The Triton kernels of float8_cast.py; imported only where Triton is installed and the kernels are used.

Each reads its matrix once, in tiles, whatever its strides. A transposed output is written from the same tile, so that
neither reading nor writing jumps from row to row in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalaunch.kernels.forms import block_counts

_TILE = 64  # rows and columns of a tile


@triton.jit
def _load_tile(x_ptr, rows, columns, row_stride, column_stride, R: tl.constexpr, K: tl.constexpr):
    """Return a tile in fp32 with zeros outside of the matrix, the places of its rows and columns, and which exist."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k = tl.program_id(1).to(tl.int64) * K + tl.arange(0, K)
    inside = (r[:, None] < rows) & (k[None, :] < columns)
    at = r[:, None] * row_stride + k[None, :] * column_stride
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), r, k, inside


@triton.jit
def _amax(
    x_ptr, amax_ptr, rows, columns, row_stride, column_stride, amax_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Raise each block's entry to the largest absolute value of a tile, which lies within one block or in rows of them.

    The bits of numbers that are not negative, as integers, have the order of the numbers, and NaN comes after infinity:
    a maximum of integers keeps a NaN, and does not depend on the order of the tiles.
    """
    tile, r, _, _ = _load_tile(x_ptr, rows, columns, row_stride, column_stride, R, K)
    bits = tl.abs(tile).to(tl.int32, bitcast=True)
    column = tl.program_id(1) * K // WIDTH if WIDTH else 0
    if HEIGHT == 1:
        tl.atomic_max(amax_ptr + r * amax_stride + column, tl.max(bits, 1), mask=r < rows, sem="relaxed")
    else:
        row = tl.program_id(0) * R // HEIGHT if HEIGHT else 0
        tl.atomic_max(amax_ptr + row * amax_stride + column, tl.max(tl.max(bits, 1), 0), sem="relaxed")


@triton.jit
def _round(x, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Round to the nearest number with MANTISSA bits after the first, ties to even; below SMALLEST, to its spacing.

    fp32 numbers around 1.5 * 2^23 spacings are whole spacings apart: adding such a number rounds. The conversion to fp8
    is exact after it; Triton's interpreter, which the tests use, would round a conversion in another way than a GPU.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # the largest not above |x|
    far = tl.maximum(power, SMALLEST) * (1.5 * 2 ** (23 - MANTISSA))
    return (x + far) - far


@triton.jit
def _cast(
    x_ptr, scales_ptr, out_ptr, transposed_ptr, rows, columns,
    row_stride, column_stride, scale_row_stride, scale_column_stride,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write x * scale in fp8, saturating, and the same transposed."""
    tile, r, k, inside = _load_tile(x_ptr, rows, columns, row_stride, column_stride, R, K)
    block_r = r // HEIGHT if HEIGHT else r * 0
    block_k = k // WIDTH if WIDTH else k * 0
    at = block_r[:, None] * scale_row_stride + block_k[None, :] * scale_column_stride
    scaled = tile * tl.load(scales_ptr + at, mask=inside, other=1.0)
    scaled = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    values = _round(scaled, SMALLEST, MANTISSA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * columns + k[None, :], values, mask=inside)
    if TRANSPOSED:
        tl.store(transposed_ptr + r[:, None] + k[None, :] * rows, values, mask=inside)


def amax(x_RK: Tensor, block: Sequence[int]) -> Tensor:
    """Return the largest absolute value of each block, fp32 [r, k]."""
    height, width = block
    bits = torch.zeros(block_counts(x_RK.shape, block), dtype=torch.int32, device=x_RK.device)
    # A tile does not cross the border of a block: powers of two that divide its extent, all rows of which have blocks.
    tile_rows = _TILE if height == 1 else math.gcd(height, _TILE)
    tile_columns = math.gcd(width, 2 * _TILE)
    if x_RK.numel():
        grid = (triton.cdiv(x_RK.shape[0], tile_rows), triton.cdiv(x_RK.shape[1], tile_columns))
        _amax[grid](
            x_RK, bits, *x_RK.shape, *x_RK.stride(), bits.stride(0),
            HEIGHT=height, WIDTH=width, R=tile_rows, K=tile_columns,
        )  # fmt: skip
    return bits.view(torch.float32)


def cast(x_RK: Tensor, scales_rk: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return x * scale in fp8, contiguous."""
    values = torch.empty(x_RK.shape, dtype=dtype, device=x_RK.device)
    _start_cast(x_RK, scales_rk, block, values, None)
    return values


def cast_both(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x * scale in fp8 and its transpose [K, R], both contiguous, of one read."""
    rows, columns = x_RK.shape
    values = torch.empty(rows, columns, dtype=dtype, device=x_RK.device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=x_RK.device)
    _start_cast(x_RK, scale_11, (0, 0), values, transposed)
    return values, transposed


def _start_cast(
    x_RK: Tensor, scales_rk: Tensor, block: Sequence[int], values: Tensor, transposed: Tensor | None
) -> None:
    if not x_RK.numel():
        return
    form = torch.finfo(values.dtype)
    grid = (triton.cdiv(x_RK.shape[0], _TILE), triton.cdiv(x_RK.shape[1], _TILE))
    _cast[grid](
        x_RK, scales_rk, values, values if transposed is None else transposed, *x_RK.shape, *x_RK.stride(),
        *scales_rk.stride(), LARGEST=form.max, SMALLEST=form.smallest_normal, MANTISSA=-int(math.log2(form.eps)),
        HEIGHT=block[0], WIDTH=block[1], TRANSPOSED=transposed is not None, R=_TILE, K=_TILE,
    )  # fmt: skip
