"""The matmuls of a linear layer in fp8: which operand has which format and which blocks, by recipe.

x W^T, dy W and dy^T x sum over different dims, and scales of rows and of parts of rows lie along the dim of the sum:
so operands are saved in 16 bits, and each matmul casts its two. dy is read and cast once for both matmuls of the
backward pass, with one scale of the tensor or with those of blocks of either layout; scales of whole rows and columns
need all of it first. Only weights have square blocks (DeepSeek-AI 2024, DeepSeek-V3 report, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from megalaunch.engine.precision.amax_history import LayerAmax
from megalaunch.kernels.float8_cast import (
    E4M3,
    E5M2,
    Float8Matrix,
    block_amax,
    power_of_two_scale,
    scale_from_amax,
)
from megalaunch.kernels.float8_matmul import scaled_matmul
from megalaunch.kernels.forms import Block
from megalaunch.kernels.linear_matmuls import OutputGrad
from megalaunch.kernels.matmul import matmul
from megalaunch.schema.precision import Float8Recipe, Float8Spec


class LinearDim(Enum):
    """The dims of a linear layer's matmuls: each of them sums over one, and its operands have two."""

    TOKENS = 0
    IN_FEATURES = 1
    OUT_FEATURES = 2


@dataclass(frozen=True)
class Operand:
    """An operand of a linear layer's matmuls.

    Attributes:
        index: Its place in `operand_dtypes` and in the amax histories.
        dims: Its dims.
    """

    index: int
    dims: tuple[LinearDim, LinearDim]


INPUT = Operand(0, (LinearDim.TOKENS, LinearDim.IN_FEATURES))
WEIGHT = Operand(1, (LinearDim.OUT_FEATURES, LinearDim.IN_FEATURES))
GRADIENT = Operand(2, (LinearDim.TOKENS, LinearDim.OUT_FEATURES))
"""The gradient of the layer's output."""

ReduceAmax = Callable[[Sequence[LinearDim], Tensor], Tensor]
"""(dims, amax) -> the maximum over the ranks that hold shards of these dims, so that scales are those of one process.

The dims are those that a scale spans: both of an operand, or with scales of rows the one that the matmul sums over.
"""


@dataclass(frozen=True)
class _Blocks:
    """The block of one scale, of activations and of weights; `power_of_two`: scales are powers of two."""

    activation: Block
    weight: Block
    power_of_two: bool = False

    def scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scales of blocks with these largest absolute values."""
        return power_of_two_scale(amax, dtype) if self.power_of_two else scale_from_amax(amax, dtype)


_BLOCKS: Mapping[Float8Recipe, _Blocks] = MappingProxyType(
    {
        "tensorwise": _Blocks((0, 0), (0, 0)),
        "delayed": _Blocks((0, 0), (0, 0)),
        "rowwise": _Blocks((1, 0), (1, 0)),
        "blockwise": _Blocks((1, 128), (128, 128)),
        "mxfp8": _Blocks((1, 32), (1, 32), power_of_two=True),
    }
)


def blocks_of(recipe: Float8Recipe) -> _Blocks:
    """Return the blocks that have a scale each."""
    return _BLOCKS[recipe]


def operand_dtypes(spec: Float8Spec) -> tuple[torch.dtype, ...]:
    """Return the formats of the operands, by `Operand.index`; hybrid: gradients are in e5m2."""
    return E4M3, E4M3, E5M2 if spec.format == "hybrid" else E4M3


@dataclass(frozen=True)
class _CastGrad(OutputGrad):
    """A gradient that was cast once for both matmuls, [T, F] and [F, T]."""

    rows_TF: Float8Matrix
    columns_FT: Float8Matrix


class Float8Matmuls:
    """The matmuls of one linear layer in fp8 (`LinearMatmuls`).

    Args:
        spec: The settings.
        emulate: Multiply dequantized values in fp32.
        reduce_amax: The reduction of an amax over ranks.
        delayed: The amax history of the layer, with the delayed recipe.

    Attributes:
        weight_amax: Returns the amax of a weight that was cast before, which may have saturated; None: of others.
    """

    def __init__(self, spec: Float8Spec, emulate: bool, reduce_amax: ReduceAmax, delayed: LayerAmax | None) -> None:
        self._blocks, self._dtypes, self._wgrad = blocks_of(spec.recipe), operand_dtypes(spec), spec.wgrad
        self._emulate, self._reduce_amax, self._delayed = emulate, reduce_amax, delayed
        self.weight_amax: Callable[[], Tensor] | None = None

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T."""
        along = LinearDim.IN_FEATURES
        a, b = self._cast(x.flatten(0, -2), INPUT, along), self._cast(weight_FH, WEIGHT, along)
        return self._multiply(a, b, x.dtype, fast=True).view(*x.shape[:-1], -1)

    def prepare(self, dy: Tensor, both: bool) -> OutputGrad:
        """Cast dy for both matmuls together, in one read of dy, except by scales of whole rows."""
        height, width = self._blocks.activation
        if not both or not self._wgrad or (height and not width):
            return OutputGrad(dy)
        dy_TF, dtype = dy.flatten(0, -2), self._dtypes[GRADIENT.index]
        if width:
            power_of_two = self._blocks.power_of_two
            return _CastGrad(dy, *Float8Matrix.quantize_blocks_both(dy_TF, width, dtype, power_of_two=power_of_two))
        if self._delayed is not None and self._delayed.has_scales:
            scale = self._delayed.scale(GRADIENT.index)
            rows, columns, amax = Float8Matrix.quantize_both_with_amax(dy_TF, scale, dtype)
            scale = self._delayed.record(GRADIENT.index, amax, scale)
            return _CastGrad(dy, replace(rows, scales=scale), replace(columns, scales=scale))
        scale = self._scale(dy_TF, GRADIENT, LinearDim.OUT_FEATURES, (0, 0), dtype)
        return _CastGrad(dy, *Float8Matrix.quantize_both(dy_TF, scale, dtype))

    def input_grad(self, grad: OutputGrad, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W."""
        along, dy = LinearDim.OUT_FEATURES, grad.dy
        a = grad.rows_TF if isinstance(grad, _CastGrad) else self._cast(dy.flatten(0, -2), GRADIENT, along)
        dx = self._multiply(a, self._cast(weight_FH.T, WEIGHT, along), dy.dtype).view(*dy.shape[:-1], -1)
        return dx if onto is None else onto + dx

    def weight_grad(self, grad: OutputGrad, x_TH: Tensor) -> Tensor:
        """Return dy^T x; in the operands' dtype with `precision.fp8.wgrad=false`."""
        dy_FT, along = grad.dy.flatten(0, -2).T, LinearDim.TOKENS
        if not self._wgrad:
            return matmul(dy_FT, x_TH)
        a = grad.columns_FT if isinstance(grad, _CastGrad) else self._cast(dy_FT, GRADIENT, along)
        return self._multiply(a, self._cast(x_TH.T, INPUT, along), x_TH.dtype)

    def _multiply(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return scaled_matmul(a, b, dtype, emulate=self._emulate, fast_accumulation=fast)

    def _cast(self, x_RK: Tensor, operand: Operand, along: LinearDim) -> Float8Matrix:
        """Cast a matrix that the matmul sums along its columns, the dim `along`."""
        block = self._blocks.weight if operand is WEIGHT else self._blocks.activation
        dtype = self._dtypes[operand.index]
        if block[1]:  # smaller blocks than a row lie within a rank's shard
            return Float8Matrix.quantize_blocks(x_RK, block, dtype, power_of_two=self._blocks.power_of_two)
        if self._delayed is not None and self._delayed.has_scales:
            return self._cast_delayed(x_RK, operand, dtype, self._delayed)
        return Float8Matrix.quantize(x_RK, self._scale(x_RK, operand, along, block, dtype), block, dtype)

    def _cast_delayed(self, x_RK: Tensor, operand: Operand, dtype: torch.dtype, delayed: LayerAmax) -> Float8Matrix:
        """Cast with the scale of earlier steps, and record the amax."""
        scale = delayed.scale(operand.index)
        if operand is WEIGHT and self.weight_amax is not None:
            scale = delayed.record(operand.index, self.weight_amax(), scale)
            return Float8Matrix.quantize(x_RK, scale, (0, 0), dtype)
        matrix, amax = Float8Matrix.quantize_with_amax(x_RK, scale, dtype)
        return replace(matrix, scales=delayed.record(operand.index, amax, scale))

    def _scale(self, x_RK: Tensor, operand: Operand, along: LinearDim, block: Block, dtype: torch.dtype) -> Tensor:
        amax = block_amax(x_RK, block)
        if self._delayed is not None:
            known = self.weight_amax if operand is WEIGHT else None
            amax = self._delayed.record(operand.index, amax if known is None else known(), amax)
        amax = self._reduce_amax(operand.dims if block[0] == 0 else (along,), amax)
        return self._blocks.scale(amax, dtype)
