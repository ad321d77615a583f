"""The grouped matmuls of routed experts in fp8.

Each expert has scales of its own: where a linear layer has one scale for a tensor, experts have one for each matrix and
for the rows of each expert. Weight gradients sum over the rows of an expert, whose blocks begin at its first row.
Shapes: R rows in the order of their experts, E experts of this rank, H input and F output features, P padded rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalaunch.engine.precision.amax_history import LayerAmax
from megalaunch.engine.precision.float8 import (
    GRADIENT,
    INPUT,
    WEIGHT,
    LinearDim,
    Operand,
    ReduceAmax,
    blocks_of,
    operand_dtypes,
)
from megalaunch.kernels.float8_cast import Float8Matrix, block_amax
from megalaunch.kernels.float8_grouped import PaddedGroups, scaled_columns_times_rows, scaled_rows_times_matrices
from megalaunch.kernels.forms import Block
from megalaunch.kernels.grouped_linear import columns_times_rows, experts_of_rows
from megalaunch.schema.precision import Float8Spec

_ROW_ALIGNMENT = 16  # rows of an expert whose values start at 16 bytes, as the operator needs where it sums over rows


class Float8GroupedMatmuls:
    """The matmuls of one grouped linear layer in fp8 (`GroupedMatmuls`).

    Args:
        spec: The settings.
        emulate: Multiply dequantized values in fp32.
        reduce_amax: The reduction of an amax over ranks.
        delayed: The amax histories of this rank's experts, with the delayed recipe.

    Attributes:
        weight_amax: Returns the amaxes of weights that were cast before, which may have saturated; None: of others.
    """

    def __init__(self, spec: Float8Spec, emulate: bool, reduce_amax: ReduceAmax, delayed: LayerAmax | None) -> None:
        self._blocks, self._dtypes, self._wgrad = blocks_of(spec.recipe), operand_dtypes(spec), spec.wgrad
        self._emulate, self._reduce_amax, self._delayed = emulate, reduce_amax, delayed
        self.weight_amax: Callable[[], Tensor] | None = None

    def output(self, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return x W_e^T."""
        along = LinearDim.IN_FEATURES
        a, b = self._cast_rows(x_RH, INPUT, along, offsets_E), self._cast_matrices(weight_EFH, along)
        return scaled_rows_times_matrices(a, b, offsets_E, x_RH.dtype, emulate=self._emulate, fast=True)

    def input_grad(self, dy_RF: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy W_e."""
        along = LinearDim.OUT_FEATURES
        a = self._cast_rows(dy_RF, GRADIENT, along, offsets_E)
        b = self._cast_matrices(weight_EFH.transpose(1, 2), along)
        return scaled_rows_times_matrices(a, b, offsets_E, dy_RF.dtype, emulate=self._emulate)

    def weight_grad(self, dy_RF: Tensor, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy_e^T x_e; in the operands' dtype with `precision.fp8.wgrad=false`."""
        if not self._wgrad:
            return columns_times_rows(dy_RF, x_RH, offsets_E)
        width = self._blocks.activation[1]
        groups = PaddedGroups.of(offsets_E, x_RH.shape[0], width or _ROW_ALIGNMENT)
        a, b = (self._cast_columns(rows, operand, groups) for rows, operand in ((dy_RF, GRADIENT), (x_RH, INPUT)))
        return scaled_columns_times_rows(a, b, groups, x_RH.dtype, width=width, emulate=self._emulate)

    def _cast_matrices(self, weight_ENK: Tensor, along: LinearDim) -> Float8Matrix:
        """Cast the experts' matrices, one below the other: [E, N, K] -> [E N, K]."""
        _, rows, columns = weight_ENK.shape
        x_RK = weight_ENK.reshape(-1, columns)
        height, width = self._blocks.weight
        block = (height or rows, width)
        if width:
            return self._quantize_blocks(x_RK, WEIGHT, block)
        amax = self._reduce_amax(WEIGHT.dims if height == 0 else (along,), block_amax(x_RK, block))
        return self._quantize(x_RK, amax, WEIGHT, block)

    def _cast_rows(self, x_RK: Tensor, operand: Operand, along: LinearDim, offsets_E: Tensor) -> Float8Matrix:
        """Cast rows that the product sums along their columns, the dim `along`."""
        height, width = self._blocks.activation
        if width:
            return self._quantize_blocks(x_RK, operand, (height, width))
        if height:
            amax = self._reduce_amax((along,), block_amax(x_RK, (height, width)))
            return self._quantize(x_RK, amax, operand, (height, width))
        experts_R = experts_of_rows(offsets_E, x_RK.shape[0])
        amax_E1 = _amax_of_groups(
            x_RK.abs().amax(1, keepdim=True).float(),
            experts_R.where(torch.arange(x_RK.shape[0], device=x_RK.device) < offsets_E[-1], offsets_E.shape[0]),
            offsets_E.shape[0],
        )
        scales_E1 = self._scale(self._reduce_amax(operand.dims, amax_E1), operand)
        return Float8Matrix.quantize(x_RK, scales_E1[experts_R], (1, 0), self._dtypes[operand.index])

    def _cast_columns(self, x_RK: Tensor, operand: Operand, groups: PaddedGroups) -> Float8Matrix:
        """Cast rows that the product sums over: [R, K] -> [K, P]."""
        x_KP = groups.pad(x_RK).t()
        height, width = self._blocks.activation
        block = (height, groups.width)
        if width:
            return self._quantize_blocks(x_KP, operand, block)
        amax = block_amax(x_KP, block)  # [K or 1, P / width]
        amax = _amax_of_groups(amax.t(), groups.expert_of_block, groups.offsets_E.shape[0])
        amax = self._reduce_amax(operand.dims if height == 0 else (LinearDim.TOKENS,), amax)
        scales = self._scale(amax, operand)[groups.expert_of_block].t()
        return Float8Matrix.quantize(x_KP, scales, block, self._dtypes[operand.index])

    def _quantize_blocks(self, x_RK: Tensor, operand: Operand, block: Block) -> Float8Matrix:
        """Cast blocks of parts of rows, which lie within a rank's shard, by their own amaxes."""
        dtype, power_of_two = self._dtypes[operand.index], self._blocks.power_of_two
        return Float8Matrix.quantize_blocks(x_RK, block, dtype, power_of_two=power_of_two)

    def _quantize(self, x_RK: Tensor, amax: Tensor, operand: Operand, block: Block) -> Float8Matrix:
        return Float8Matrix.quantize(x_RK, self._scale(amax, operand), block, self._dtypes[operand.index])

    def _scale(self, amax: Tensor, operand: Operand) -> Tensor:
        """Return the scales of an amax; of delayed scaling those of this step, [E, 1]."""
        if operand is WEIGHT and self.weight_amax is not None:
            amax = self.weight_amax().view_as(amax)
        scale = self._blocks.scale(amax, self._dtypes[operand.index])
        if self._delayed is None:
            return scale
        scale = self._delayed.record(operand.index, amax, scale)
        if not self._delayed.has_scales:
            return scale
        return self._delayed.scale(operand.index).where(self._delayed.is_known(operand.index), scale)


def _amax_of_groups(amax_BC: Tensor, groups_B: Tensor, groups: int) -> Tensor:
    """Return the largest of the rows of each group, [B, C] -> [G, C]; 0 of an empty one. Group G is left out."""
    found = amax_BC.new_zeros(groups + 1, amax_BC.shape[1])
    found.scatter_reduce_(0, groups_B[:, None].expand_as(amax_BC), amax_BC, "amax")
    return found[:-1]
