"""a b^T of two fp8 matrices: the device's scaled matmul, and its emulation in fp32.

The emulation multiplies the dequantized values in fp32. An fp8 unit multiplies the same values and accumulates in fp32,
so that only the order of the sums differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megalaunch.kernels.float8_cast import Block, Float8Matrix

NATIVE_BLOCKS: tuple[Block, ...] = ((0, 0), (1, 0))
"""Blocks of the scales that `scaled_matmul` computes natively: of the whole matrix, of a row."""


def scaled_matmul(
    a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, emulate: bool, fast_accumulation: bool = False
) -> Tensor:
    """Return a b^T, [M, K] x [N, K] -> [M, N] in `dtype`.

    Args:
        a: The left matrix.
        b: The right matrix, transposed, as fp8 units read it: both matrices are contiguous along K.
        dtype: Of the result; 16 bits for the native matmul.
        emulate: Multiply in fp32, on any device and with blocks of any shape.
        fast_accumulation: Hopper sums up products with 14 bits of mantissa instead of promoting them to fp32.
    """
    if emulate:
        return (a.dequantize() @ b.dequantize().T).to(dtype)
    assert a.block == b.block in NATIVE_BLOCKS, "plan/supported.py refuses other recipes without emulation"
    kind = ScalingType.TensorWise if a.block == (0, 0) else ScalingType.RowWise
    inverse_a, inverse_b = a.scales.reciprocal(), b.scales.reciprocal()
    return F.scaled_mm(
        a.values,
        b.values.t(),
        inverse_a.view(()) if kind is ScalingType.TensorWise else inverse_a,
        kind,
        inverse_b.view(()) if kind is ScalingType.TensorWise else inverse_b.t(),
        kind,
        output_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
