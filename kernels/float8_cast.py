"""Casts to fp8 with one scale per block of a matrix, and back: amax, scale, saturating cast.

In plain torch, the reference, a cast passes nine times over its matrix. Triton kernels read it once for the amax and
once for the cast, also of the matrix and its transpose together; and once in all where the scale is known before
(delayed scaling), or belongs to a block that fits into a tile (blockwise, mxfp8), whose blocks along rows and along
columns have scales of their own.

Formats are those of Micikevicius et al. 2022 (FP8 formats for deep learning): e4m3 reaches 448 and has no infinity,
e5m2 reaches 57,344. A block is (rows, columns); 0 stands for all of them: (0, 0) is the whole matrix, (1, 0) a row,
(1, 128) a part of a row. Blocks at the ends may be smaller.
Shapes: R rows, K columns (the dimension that a matmul sums over), r and k blocks along them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import LARGEST_SCALE, Block, CastKernels, kernel_forms, uses_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Float8Matrix:
    """An fp8 matrix [R, K] with its scales, fp32 [r, k]: x is about values / scale."""

    values: Tensor
    scales: Tensor
    block: Block

    @classmethod
    def quantize(cls, x_RK: Tensor, scales_rk: Tensor, block: Block, dtype: torch.dtype) -> Float8Matrix:
        """Cast x * scale to the nearest fp8 value, ties to even; larger values saturate, NaN stays NaN."""
        return cls(_kernels(x_RK).cast(x_RK, scales_rk, block, dtype), scales_rk, block)

    @classmethod
    def quantize_both(cls, x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Float8Matrix, Float8Matrix]:
        """Cast x and its transpose with one scale of the matrix, as `quantize` casts each."""
        values, transposed = _kernels(x_RK).cast_both(x_RK, scale_11, dtype)
        return cls(values, scale_11, (0, 0)), cls(transposed, scale_11, (0, 0))

    @classmethod
    def quantize_blocks(cls, x_RK: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool) -> Float8Matrix:
        """Cast x with the scales of its blocks' own amaxes: by `power_of_two_scale`, or `scale_from_amax`."""
        values, scales = _kernels(x_RK).cast_blocks(x_RK, block, power_of_two, dtype)
        return cls(values, scales, block)

    @classmethod
    def quantize_blocks_both(
        cls, x_RK: Tensor, width: int, dtype: torch.dtype, *, power_of_two: bool
    ) -> tuple[Float8Matrix, Float8Matrix]:
        """Cast x and its transpose, each with the scales of its own (1, width) blocks, as `quantize_blocks` does."""
        values, scales, transposed, transposed_scales = _kernels(x_RK).cast_blocks_both(
            x_RK, width, power_of_two, dtype
        )
        return cls(values, scales, (1, width)), cls(transposed, transposed_scales, (1, width))

    @classmethod
    def quantize_with_amax(cls, x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Float8Matrix, Tensor]:
        """Cast x with one scale that is known before, and return its amax too, [1, 1]."""
        values, _, amax = _kernels(x_RK).cast_with_amax(x_RK, scale_11, dtype, False)
        return cls(values, scale_11, (0, 0)), amax

    @classmethod
    def quantize_both_with_amax(
        cls, x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype
    ) -> tuple[Float8Matrix, Float8Matrix, Tensor]:
        """Cast x and its transpose with one scale that is known before, and return the amax too, [1, 1]."""
        values, transposed, amax = _kernels(x_RK).cast_with_amax(x_RK, scale_11, dtype, True)
        return cls(values, scale_11, (0, 0)), cls(transposed, scale_11, (0, 0)), amax

    def dequantize(self) -> Tensor:
        """Return values / scale in fp32, [R, K]."""
        blocks = _blocks(self.values.float(), self.block)  # a copy, scaled in place: half of the memory
        return _matrix(blocks.mul_(self.scales.reciprocal()[:, None, :, None]), self.values.shape)


def block_amax(x_RK: Tensor, block: Block) -> Tensor:
    """Return the largest absolute value of each block, fp32 [r, k]; NaN if a block holds one."""
    return _kernels(x_RK).amax(x_RK, block)


def scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return largest / (amax 2^margin), by which `amax` becomes the format's largest value; 1 where amax is 0.

    An amax that is infinite or NaN gives a scale of 0 or NaN: the products are NaN, so that the step reports it.
    """
    largest = torch.full_like(amax, torch.finfo(dtype).max)  # number / tensor is number * reciprocal, rounded twice
    scale = (largest / (amax * 2.0**margin)).clamp(max=LARGEST_SCALE)
    return torch.where(amax == 0, 1.0, scale)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two by which no value exceeds the format, as the exponents of MXFP8 (e8m0) are.

    The rounding is NVIDIA's (2^ceil(log2(amax / largest)) is the inverse): with the floor of the OCP MX specification,
    section 6.3, values would saturate.
    """
    mantissa, exponent = torch.frexp(amax / torch.finfo(dtype).max)
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(amax), -exponent)
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def _kernels(x: Tensor) -> CastKernels:
    """Return the form for the device of `x`; the compiler joins the reference's operators itself."""
    form = kernel_forms().cast_kernels
    if form is not None:
        return form
    if torch.compiler.is_compiling() or not uses_triton(x) or not _casts_in_hardware(x.device):
        return REFERENCE
    return triton_kernels()


@cache
def _casts_in_hardware(device: torch.device) -> bool:
    """Return whether Triton converts to these formats: on NVIDIA GPUs from Ada and Hopper on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def triton_kernels() -> CastKernels:
    """Return the Triton form, which imports Triton when it runs."""
    from megalaunch.kernels import float8_operators as operators

    return CastKernels(
        operators.float8_amax,
        operators.float8_cast,
        operators.float8_cast_both,
        operators.float8_cast_blocks,
        operators.float8_cast_blocks_both,
        operators.float8_cast_with_amax,
    )


def _amax(x_RK: Tensor, block: Block) -> Tensor:
    if block == (0, 0):
        return x_RK.abs().amax().float().view(1, 1)
    return _blocks(x_RK.abs(), block).amax(dim=(1, 3)).float()


def _cast(x_RK: Tensor, scales_rk: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    # Clamped explicitly: whether a cast saturates depends on device and format.
    blocks = _blocks(x_RK.to(torch.float32, copy=True), block)
    scaled = blocks.mul_(scales_rk[:, None, :, None]).clamp_(-largest, largest)
    return _matrix(scaled.to(dtype), x_RK.shape)


def _cast_both(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = _cast(x_RK, scale_11, (0, 0), dtype)
    return values, values.t().contiguous()


def _cast_blocks(x_RK: Tensor, block: Block, power_of_two: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    amax = _amax(x_RK, block)
    scales = power_of_two_scale(amax, dtype) if power_of_two else scale_from_amax(amax, dtype)
    return _cast(x_RK, scales, block, dtype), scales


def _cast_blocks_both(
    x_RK: Tensor, width: int, power_of_two: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = (_cast_blocks(each, (1, width), power_of_two, dtype) for each in (x_RK, x_RK.t()))
    return *rows, *columns


def _cast_with_amax(
    x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    values = _cast(x_RK, scale_11, (0, 0), dtype)
    transposed = values.t().contiguous() if transpose else values.new_empty(0)
    return values, transposed, _amax(x_RK, (0, 0))


REFERENCE = CastKernels(_amax, _cast, _cast_both, _cast_blocks, _cast_blocks_both, _cast_with_amax)
"""The plain-torch form."""


def _blocks(x_RK: Tensor, block: Block) -> Tensor:
    """View a matrix by blocks, [r, rows, k, columns], padded with zeros to whole blocks."""
    rows, columns = x_RK.shape
    height, width = block[0] or rows, block[1] or columns
    if rows % height or columns % width:
        x_RK = F.pad(x_RK, (0, -columns % width, 0, -rows % height))
    return x_RK.reshape(x_RK.shape[0] // height, height, x_RK.shape[1] // width, width)


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Return the matrix of `_blocks`, without padding."""
    whole = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return whole[: shape[0], : shape[1]].contiguous()
