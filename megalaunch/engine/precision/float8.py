"""The matmuls of a linear layer in fp8: which operand has which format and which blocks, by recipe.

x W^T, dy W and dy^T x sum over different dims, and scales of rows and of parts of rows lie along the dim of the sum:
so operands are saved in 16 bits, and each matmul casts its two. Only weights have square blocks (DeepSeek-AI 2024,
DeepSeek-V3 report, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import torch
from torch import Tensor

from megalaunch.engine.precision.amax_history import LayerAmax
from megalaunch.kernels.float8_cast import (
    E4M3,
    E5M2,
    Block,
    Float8Matrix,
    block_amax,
    power_of_two_scale,
    scale_from_amax,
)
from megalaunch.kernels.float8_matmul import scaled_matmul
from megalaunch.kernels.matmul import matmul
from megalaunch.schema.precision import Float8Recipe, Float8Spec


class Operand(IntEnum):
    """The operands of a linear layer's matmuls: its input, its weight, the gradient of its output."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2


ReduceAmax = Callable[[Operand, Tensor], Tensor]
"""(operand, amax) -> the maximum over the ranks that hold its shards, so that scales are those of one process.

Called for scales of whole tensors only.
"""


@dataclass(frozen=True)
class _Blocks:
    """The block of one scale, of activations and of weights; `power_of_two`: scales are powers of two."""

    activation: Block
    weight: Block
    power_of_two: bool = False


_BLOCKS: Mapping[Float8Recipe, _Blocks] = MappingProxyType(
    {
        "tensorwise": _Blocks((0, 0), (0, 0)),
        "delayed": _Blocks((0, 0), (0, 0)),
        "rowwise": _Blocks((1, 0), (1, 0)),
        "blockwise": _Blocks((1, 128), (128, 128)),
        "mxfp8": _Blocks((1, 32), (1, 32), power_of_two=True),
    }
)


def operand_dtypes(spec: Float8Spec) -> tuple[torch.dtype, ...]:
    """Return the formats of the operands, in the order of `Operand`; hybrid: gradients are in e5m2."""
    return E4M3, E4M3, E5M2 if spec.format == "hybrid" else E4M3


class Float8Matmuls:
    """The matmuls of one linear layer in fp8 (`LinearMatmuls`).

    Args:
        spec: The settings.
        emulate: Multiply dequantized values in fp32.
        reduce_amax: The reduction of the amax of a whole operand over ranks.
        delayed: The amax history of the layer, with the delayed recipe.
    """

    def __init__(self, spec: Float8Spec, emulate: bool, reduce_amax: ReduceAmax, delayed: LayerAmax | None) -> None:
        self._blocks, self._dtypes, self._wgrad = _BLOCKS[spec.recipe], operand_dtypes(spec), spec.wgrad
        self._emulate, self._reduce_amax, self._delayed = emulate, reduce_amax, delayed

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T."""
        a, b = self._cast(x.flatten(0, -2), Operand.INPUT), self._cast(weight_FH, Operand.WEIGHT)
        return self._multiply(a, b, x.dtype, fast=True).view(*x.shape[:-1], -1)

    def input_grad(self, dy: Tensor, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W."""
        a, b = self._cast(dy.flatten(0, -2), Operand.GRADIENT), self._cast(weight_FH.T, Operand.WEIGHT)
        dx = self._multiply(a, b, dy.dtype).view(*dy.shape[:-1], -1)
        return dx if onto is None else onto + dx

    def weight_grad(self, dy_TF: Tensor, x_TH: Tensor) -> Tensor:
        """Return dy^T x; in the operands' dtype with `precision.fp8.wgrad=false`."""
        if not self._wgrad:
            return matmul(dy_TF.T, x_TH)
        return self._multiply(self._cast(dy_TF.T, Operand.GRADIENT), self._cast(x_TH.T, Operand.INPUT), x_TH.dtype)

    def _multiply(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return scaled_matmul(a, b, dtype, emulate=self._emulate, fast_accumulation=fast)

    def _cast(self, x_RK: Tensor, operand: Operand) -> Float8Matrix:
        """Cast a matrix that the matmul sums along its columns."""
        block = self._blocks.weight if operand is Operand.WEIGHT else self._blocks.activation
        dtype = self._dtypes[operand]
        return Float8Matrix.quantize(x_RK, self._scale(x_RK, operand, block, dtype), block, dtype)

    def _scale(self, x_RK: Tensor, operand: Operand, block: Block, dtype: torch.dtype) -> Tensor:
        amax = block_amax(x_RK, block)
        if self._delayed is not None:
            self._delayed.record(operand, amax)
            if self._delayed.has_scales:
                return self._delayed.scale(operand)
        if block == (0, 0):
            amax = self._reduce_amax(operand, amax)
        return power_of_two_scale(amax, dtype) if self._blocks.power_of_two else scale_from_amax(amax, dtype)
