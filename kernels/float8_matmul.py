"""a b^T of two fp8 matrices: the device's scaled matmul, and its emulation in fp32.

The emulation multiplies the dequantized values in fp32. An fp8 unit multiplies the same values and accumulates in fp32,
so that only the order of the sums differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megalaunch.kernels.float8_cast import Float8Matrix
from megalaunch.kernels.forms import Block


def scaled_matmul(
    a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, emulate: bool, fast_accumulation: bool = False
) -> Tensor:
    """Return a b^T, [M, K] x [N, K] -> [M, N] in `dtype`.

    Args:
        a: The left matrix.
        b: The right matrix, transposed, as fp8 units read it: both matrices are contiguous along K.
        dtype: Of the result; 16 bits for the native matmul.
        emulate: Multiply in fp32, on any device and with blocks of any shape.
        fast_accumulation: Hopper sums up products with 14 bits of mantissa instead of promoting them to fp32; matmuls
            with blocks of part of a row always promote.
    """
    if emulate:
        return (a.dequantize() @ b.dequantize().T).to(dtype)
    left, right = _NATIVE[a.block], _NATIVE[b.block]
    return F.scaled_mm(
        a.values,
        b.values.t(),
        left.inverse_scales(a.scales),
        left.kind,
        right.inverse_scales_of_right(b.scales),
        right.kind,
        swizzle_a=left.swizzle,
        swizzle_b=right.swizzle,
        output_dtype=dtype,
        use_fast_accum=fast_accumulation and left.kind in (ScalingType.TensorWise, ScalingType.RowWise),
    )


def _scalar(scales: Tensor) -> Tensor:
    return scales.reciprocal().view(())


def _rows(scales: Tensor) -> Tensor:
    return scales.reciprocal()


def _columns(scales: Tensor) -> Tensor:
    return scales.reciprocal().t()


def _row_parts(scales_rk: Tensor) -> Tensor:
    """Return inverse scales of 1 x 128 blocks, [R, K / 128] with the rows next to each other in memory."""
    return scales_rk.reciprocal().t().contiguous().t()


def _square_blocks(scales_rk: Tensor) -> Tensor:
    """Return inverse scales of 128 x 128 blocks, [K / 128, R / 128] transposed in memory; K / 128 padded to 4."""
    padded = F.pad(scales_rk.reciprocal(), (0, -scales_rk.shape[1] % 4))
    return padded.contiguous().t()


def _swizzled(scales_rk: Tensor) -> Tensor:
    """Return inverse scales of 1 x 32 blocks as exponents (e8m0), in the order in which tensor cores read them.

    Tiles of 128 rows and 4 blocks follow each other row by row; in a tile, row 32 i + j and block k have the place
    16 j + 4 i + k (NVIDIA cuBLAS documentation, "1D block scaling factors layout"). Scales are padded to whole tiles.
    """
    rows, blocks = scales_rk.shape
    padded = F.pad(scales_rk.reciprocal(), (0, -blocks % 4, 0, -rows % 128)).to(torch.float8_e8m0fnu)
    tiles = padded.view(torch.uint8).view(-1, 4, 32, padded.shape[1] // 4, 4)  # [row tile, i, j, block tile, k]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class _NativeScales:
    """How torch's scaled matmul takes the scales of one kind of block.

    Attributes:
        kind: Its name of the kind.
        inverse_scales: Scales [r, k] -> what multiplies the left matrix.
        inverse_scales_of_right: The same of the right matrix.
        swizzle: The order of scales in memory.
    """

    kind: ScalingType
    inverse_scales: Callable[[Tensor], Tensor]
    inverse_scales_of_right: Callable[[Tensor], Tensor]
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE


_NATIVE: Mapping[Block, _NativeScales] = MappingProxyType(
    {
        (0, 0): _NativeScales(ScalingType.TensorWise, _scalar, _scalar),
        (1, 0): _NativeScales(ScalingType.RowWise, _rows, _columns),
        (1, 128): _NativeScales(ScalingType.BlockWise1x128, _row_parts, _row_parts),
        (128, 128): _NativeScales(ScalingType.BlockWise128x128, _square_blocks, _square_blocks),
        (1, 32): _NativeScales(ScalingType.BlockWise1x32, _swizzled, _swizzled, SwizzleType.SWIZZLE_32_4_4),
    }
)
