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

from megalaunch.kernels.forms import LARGEST_SCALE, block_counts

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
def _to_float8(tile, scales, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Return tile * scales, saturated and rounded to numbers that the format holds."""
    scaled = tl.clamp(tile * scales, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return _round(scaled, SMALLEST, MANTISSA)


@triton.jit
def _scale(amax_bits, LARGEST: tl.constexpr, LARGEST_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the scales of amaxes, given by their bits, as `power_of_two_scale` or `scale_from_amax` do."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if POWER_OF_TWO:
        quotient = tl.math.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)  # ceil(log2(quotient))
        scale = ((127 - tl.maximum(exponent, -126)) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
        return tl.where(quotient == 0.0, 1.0, scale)
    else:
        scale = tl.math.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)
        scale = tl.minimum(scale, LARGEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def _cast_blocks(
    x_ptr, scales_ptr, out_ptr, rows, columns, row_stride, column_stride, scales_stride,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, LARGEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write scales and fp8 values of a tile, which is one block, or with ROWS has a block in each row."""
    tile, r, k, inside = _load_tile(x_ptr, rows, columns, row_stride, column_stride, R, K)
    amax_bits = tl.max(tl.abs(tile).to(tl.int32, bitcast=True), 1)
    if not ROWS:
        amax_bits = tl.zeros((R,), tl.int32) + tl.max(amax_bits, 0)
    scales = _scale(amax_bits, LARGEST, LARGEST_SCALE, POWER_OF_TWO)
    block_row = r if ROWS else r // R  # all rows of a block write the same scale
    tl.store(scales_ptr + block_row * scales_stride + tl.program_id(1), scales, mask=r < rows)
    values = _to_float8(tile, scales[:, None], LARGEST, SMALLEST, MANTISSA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * columns + k[None, :], values, mask=inside)


@triton.jit
def _cast_blocks_both(
    x_ptr, scales_ptr, out_ptr, transposed_scales_ptr, transposed_ptr, rows, columns, row_stride, column_stride,
    scales_stride, transposed_scales_stride, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write scales and fp8 values of a square tile, whose rows are blocks, and of its transpose, whose rows are too."""
    tile, r, k, inside = _load_tile(x_ptr, rows, columns, row_stride, column_stride, WIDTH, WIDTH)
    bits = tl.abs(tile).to(tl.int32, bitcast=True)
    scales = _scale(tl.max(bits, 1), LARGEST, LARGEST_SCALE, POWER_OF_TWO)
    tl.store(scales_ptr + r * scales_stride + tl.program_id(1), scales, mask=r < rows)
    values = _to_float8(tile, scales[:, None], LARGEST, SMALLEST, MANTISSA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * columns + k[None, :], values, mask=inside)
    scales = _scale(tl.max(bits, 0), LARGEST, LARGEST_SCALE, POWER_OF_TWO)
    tl.store(transposed_scales_ptr + k * transposed_scales_stride + tl.program_id(0), scales, mask=k < columns)
    values = _to_float8(tile, scales[None, :], LARGEST, SMALLEST, MANTISSA).to(out_ptr.dtype.element_ty)
    tl.store(transposed_ptr + r[:, None] + k[None, :] * rows, values, mask=inside)


@triton.jit
def _cast(
    x_ptr, scales_ptr, out_ptr, transposed_ptr, amax_ptr, rows, columns,
    row_stride, column_stride, scale_row_stride, scale_column_stride,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write x * scale in fp8, saturating, and the same transposed; raise the amax of all to that of the tile."""
    tile, r, k, inside = _load_tile(x_ptr, rows, columns, row_stride, column_stride, R, K)
    block_r = r // HEIGHT if HEIGHT else r * 0
    block_k = k // WIDTH if WIDTH else k * 0
    at = block_r[:, None] * scale_row_stride + block_k[None, :] * scale_column_stride
    scales = tl.load(scales_ptr + at, mask=inside, other=1.0)
    values = _to_float8(tile, scales, LARGEST, SMALLEST, MANTISSA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * columns + k[None, :], values, mask=inside)
    if TRANSPOSED:
        tl.store(transposed_ptr + r[:, None] + k[None, :] * rows, values, mask=inside)
    if amax_ptr is not None:
        bits = tl.abs(tile).to(tl.int32, bitcast=True)
        tl.atomic_max(amax_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")


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
    _start_cast(x_RK, scales_rk, block, values, None, None)
    return values


def cast_blocks(x_RK: Tensor, scales_rk: Tensor, values: Tensor, block: Sequence[int], power_of_two: bool) -> None:
    """Write the scale of each block, (1, width) or a square one, and x * scale in fp8, of one read.

    Args:
        x_RK: What is cast.
        scales_rk: Where the scales are written, fp32 and contiguous.
        values: Where the fp8 values are written, contiguous.
        block: The block; both extents are powers of two.
        power_of_two: Whether scales are powers of two.
    """
    height, width = block
    assert height in (1, width), "a tile is a block, or has one in each row"
    if not x_RK.numel():
        return
    form = torch.finfo(values.dtype)
    _cast_blocks[tuple(scales_rk.shape) if height > 1 else (triton.cdiv(x_RK.shape[0], _TILE), scales_rk.shape[1])](
        x_RK, scales_rk, values, *x_RK.shape, *x_RK.stride(), scales_rk.stride(0),
        LARGEST=form.max, SMALLEST=form.smallest_normal, MANTISSA=-int(math.log2(form.eps)),
        LARGEST_SCALE=LARGEST_SCALE, POWER_OF_TWO=power_of_two, ROWS=height == 1,
        R=_TILE if height == 1 else height, K=width, num_warps=4 if height == 1 else 8,
    )  # fmt: skip


def cast_blocks_both(
    x_RK: Tensor,
    values: Tensor,
    scales_rk: Tensor,
    transposed: Tensor,
    transposed_scales_kr: Tensor,
    width: int,
    power_of_two: bool,
) -> None:
    """Write scales and fp8 values of x and of its transpose, by (1, width) blocks of each, of one read.

    Args:
        x_RK: What is cast.
        values, transposed: Where the fp8 values are written, [R, K] and [K, R], contiguous.
        scales_rk, transposed_scales_kr: Where their scales are written, fp32 and contiguous.
        width: Columns of a block, a power of two.
        power_of_two: Whether scales are powers of two.
    """
    if not x_RK.numel():
        return
    form = torch.finfo(values.dtype)
    _cast_blocks_both[transposed_scales_kr.shape[1], scales_rk.shape[1]](
        x_RK, scales_rk, values, transposed_scales_kr, transposed, *x_RK.shape, *x_RK.stride(),
        scales_rk.stride(0), transposed_scales_kr.stride(0), LARGEST=form.max, SMALLEST=form.smallest_normal,
        MANTISSA=-int(math.log2(form.eps)), LARGEST_SCALE=LARGEST_SCALE, POWER_OF_TWO=power_of_two,
        WIDTH=width, num_warps=4 if width < _TILE else 8,
    )  # fmt: skip


def cast_with_amax(
    x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x * scale in fp8, its transpose [K, R] (else without elements) and the amax of x, of one read."""
    rows, columns = x_RK.shape
    values = torch.empty(rows, columns, dtype=dtype, device=x_RK.device)
    transposed = values.new_empty(columns, rows) if transpose else None
    bits = torch.zeros(1, 1, dtype=torch.int32, device=x_RK.device)
    _start_cast(x_RK, scale_11, (0, 0), values, transposed, bits)
    return values, values.new_empty(0) if transposed is None else transposed, bits.view(torch.float32)


def cast_both(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x * scale in fp8 and its transpose [K, R], both contiguous, of one read."""
    rows, columns = x_RK.shape
    values = torch.empty(rows, columns, dtype=dtype, device=x_RK.device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=x_RK.device)
    _start_cast(x_RK, scale_11, (0, 0), values, transposed, None)
    return values, transposed


def _start_cast(
    x_RK: Tensor,
    scales_rk: Tensor,
    block: Sequence[int],
    values: Tensor,
    transposed: Tensor | None,
    amax: Tensor | None,
) -> None:
    if not x_RK.numel():
        return
    form = torch.finfo(values.dtype)
    grid = (triton.cdiv(x_RK.shape[0], _TILE), triton.cdiv(x_RK.shape[1], _TILE))
    _cast[grid](
        x_RK, scales_rk, values, values if transposed is None else transposed, amax, *x_RK.shape, *x_RK.stride(),
        *scales_rk.stride(), LARGEST=form.max, SMALLEST=form.smallest_normal, MANTISSA=-int(math.log2(form.eps)),
        HEIGHT=block[0], WIDTH=block[1], TRANSPOSED=transposed is not None, R=_TILE, K=_TILE,
    )  # fmt: skip
