"""The Triton kernels of fp8 as operators of torch (namespace megalaunch), with rules for fake tensors.

They are imported as those of operators.py are. None is differentiable: their callers are backward passes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.library import custom_op

from megalaunch.kernels.forms import block_counts


@custom_op("megalaunch::float8_amax", mutates_args=())
def float8_amax(x_RK: Tensor, block: Sequence[int]) -> Tensor:
    """Return the largest absolute value of each block (`CastKernels.amax`)."""
    from megalaunch.kernels.float8_cast_triton import amax

    return amax(x_RK, block)


@float8_amax.register_fake
def _(x_RK: Tensor, block: Sequence[int]) -> Tensor:
    return x_RK.new_empty(block_counts(x_RK.shape, block), dtype=torch.float32)


@custom_op("megalaunch::float8_cast", mutates_args=())
def float8_cast(x_RK: Tensor, scales_rk: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return fp8 values (`CastKernels.cast`)."""
    from megalaunch.kernels.float8_cast_triton import cast

    return cast(x_RK, scales_rk, block, dtype)


@float8_cast.register_fake
def _(x_RK: Tensor, scales_rk: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return x_RK.new_empty(x_RK.shape, dtype=dtype)


@custom_op("megalaunch::float8_cast_both", mutates_args=())
def float8_cast_both(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp8 values and their transpose (`CastKernels.cast_both`)."""
    from megalaunch.kernels.float8_cast_triton import cast_both

    return cast_both(x_RK, scale_11, dtype)


@float8_cast_both.register_fake
def _(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x_RK.new_empty(x_RK.shape, dtype=dtype), x_RK.new_empty(x_RK.shape[::-1], dtype=dtype)


@custom_op("megalaunch::float8_cast_blocks", mutates_args=())
def float8_cast_blocks(
    x_RK: Tensor, block: Sequence[int], power_of_two: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return fp8 values and the scale of each block (`CastKernels.cast_blocks`)."""
    from megalaunch.kernels.float8_cast_triton import cast_blocks

    values, scales = _empty_blocks(x_RK, block, dtype)
    cast_blocks(x_RK, scales, values, block, power_of_two)
    return values, scales


@float8_cast_blocks.register_fake
def _(x_RK: Tensor, block: Sequence[int], power_of_two: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_blocks(x_RK, block, dtype)


def _empty_blocks(x_RK: Tensor, block: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    counts = block_counts(x_RK.shape, block)
    return x_RK.new_empty(x_RK.shape, dtype=dtype), x_RK.new_empty(counts, dtype=torch.float32)


@custom_op("megalaunch::float8_cast_blocks_both", mutates_args=())
def float8_cast_blocks_both(
    x_RK: Tensor, width: int, power_of_two: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return fp8 values and scales of x, and of its transpose (`CastKernels.cast_blocks_both`)."""
    from megalaunch.kernels.float8_cast_triton import cast_blocks_both

    made = *_empty_blocks(x_RK, (1, width), dtype), *_empty_blocks(x_RK.t(), (1, width), dtype)
    cast_blocks_both(x_RK, *made, width, power_of_two)
    return made


@float8_cast_blocks_both.register_fake
def _(x_RK: Tensor, width: int, power_of_two: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty_blocks(x_RK, (1, width), dtype), *_empty_blocks(x_RK.t(), (1, width), dtype)


@custom_op("megalaunch::float8_cast_with_amax", mutates_args=())
def float8_cast_with_amax(
    x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp8 values, their transpose or nothing, and the amax (`CastKernels.cast_with_amax`)."""
    from megalaunch.kernels.float8_cast_triton import cast_with_amax

    return cast_with_amax(x_RK, scale_11, dtype, transpose)


@float8_cast_with_amax.register_fake
def _(x_RK: Tensor, scale_11: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, transposed = (
        x_RK.new_empty(size, dtype=dtype) for size in (x_RK.shape, x_RK.shape[::-1] if transpose else 0)
    )
    return values, transposed, x_RK.new_empty(1, 1, dtype=torch.float32)


def _grouped_kernels() -> ModuleType:
    """Return the kernels of experts. Raises RuntimeError without Triton."""
    try:
        from megalaunch.kernels import float8_grouped_triton
    except ImportError as error:
        raise RuntimeError(
            f"experts in fp8 need Triton ({error}): install it, or set precision.compute_dtype=bf16; on Hopper and "
            "B200 precision.fp8.recipe=rowwise precision.fp8.format=e4m3 does without it"
        ) from error
    return float8_grouped_triton


@custom_op("megalaunch::float8_rows_times_matrices", mutates_args=())
def float8_rows_times_matrices(
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
    """Return a b_e^T for the expert e of each row, [R, K] x [E N, K] -> [R, N] in `dtype`.

    Args:
        a_RK: fp8 rows, contiguous as all matrices; in the order of their experts.
        a_scales: fp32 [R, 1], or [R, K / width].
        b_NK: The experts' fp8 matrices [N, K], one below the other.
        b_scales: fp32 [E N / height, 1], or [E N / height, K / width].
        offsets_E: int32; the rows of expert e end before offsets[e].
        height: Rows of `b_NK` that share a scale.
        width: Columns that share a scale, a power of two from 32 on; 0: all of them.
        dtype: Of the result.
        fast: Fast accumulation of products with `width` 0, see `scaled_matmul`.
    """
    product: Tensor = _grouped_kernels().rows_times_matrices(
        a_RK, a_scales, b_NK, b_scales, offsets_E, height, width, dtype, fast
    )
    return product


@float8_rows_times_matrices.register_fake
def _(
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
    return a_RK.new_empty(a_RK.shape[0], b_NK.shape[0] // offsets_E.shape[0], dtype=dtype)


@custom_op("megalaunch::float8_columns_times_rows", mutates_args=())
def float8_columns_times_rows(
    a_MP: Tensor,
    a_scales: Tensor,
    b_NP: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a_e b_e^T over the columns of each expert, [M, P] x [N, P] -> [E, M, N] in `dtype`.

    Args:
        a_MP: fp8 matrix, contiguous as all matrices.
        a_scales: fp32 [M, P / width], or [M, E], of any strides.
        b_NP: fp8 matrix.
        b_scales: fp32 [N, P / width], or [N, E], of any strides.
        offsets_E: int32; the columns of expert e end before offsets[e], a multiple of `width`.
        width: Columns that share a scale, a power of two from 32 on; 0: those of an expert.
        dtype: Of the result.
    """
    product: Tensor = _grouped_kernels().columns_times_rows(a_MP, a_scales, b_NP, b_scales, offsets_E, width, dtype)
    return product


@float8_columns_times_rows.register_fake
def _(
    a_MP: Tensor,
    a_scales: Tensor,
    b_NP: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    return a_MP.new_empty(offsets_E.shape[0], a_MP.shape[0], b_NP.shape[0], dtype=dtype)
