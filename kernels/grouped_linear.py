"""x W_e^T + b_e for rows in the order of their experts e: torch's grouped matmul, and a loop over experts as reference.

`F.grouped_mm` needs strides that are multiples of 16 bytes; other shapes and dtypes use the loop. Rows past the last
offset belong to no expert: their outputs and gradients are undefined, and callers must not read them.
Shapes: R rows, E experts, H input features, F output features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import kernel_forms
from megalaunch.kernels.matmul import needs_grad, use_fp32_matmul
from megalaunch.kernels.overridable import overridable

_ALIGNMENT = 16  # bytes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GroupedMatmuls(Protocol):
    """The matmuls of a grouped linear layer as an object, so that a layer can compute them in another precision."""

    def output(self, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return x W_e^T, [R, F]."""

    def input_grad(self, dy_RF: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy W_e, [R, H]."""

    def weight_grad(self, dy_RF: Tensor, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy_e^T x_e, [E, F, H]; zero for an expert without rows."""


class ComputeDtypeGroupedMatmuls:
    """Grouped matmuls in the dtype of their operands."""

    def output(self, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return x W_e^T."""
        return rows_times_matrices(x_RH, weight_EFH.transpose(1, 2), offsets_E)

    def input_grad(self, dy_RF: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy W_e."""
        return rows_times_matrices(dy_RF, weight_EFH, offsets_E)

    def weight_grad(self, dy_RF: Tensor, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Return dy_e^T x_e."""
        return columns_times_rows(dy_RF, x_RH, offsets_E)


GROUPED_COMPUTE_DTYPE = ComputeDtypeGroupedMatmuls()


@overridable
def grouped_linear(x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor, bias_EF: Tensor | None = None) -> Tensor:
    """Return x W_e^T + b_e for the expert e of each row, [R, H] -> [R, F]. Differentiable.

    Args:
        x_RH: Rows in the order of their experts.
        weight_EFH: The experts' weights.
        offsets_E: int32 [E]; the rows of expert e end before offsets[e]. An expert may have no rows.
        bias_EF: The experts' biases.
    """
    return _apply(GROUPED_COMPUTE_DTYPE, x_RH, weight_EFH, offsets_E, bias_EF)


def grouped_linear_by(
    matmuls: GroupedMatmuls, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor, bias_EF: Tensor | None = None
) -> Tensor:
    """Return x W_e^T + b_e by the given matmuls; arguments of `grouped_linear`. Differentiable."""
    if matmuls is GROUPED_COMPUTE_DTYPE:
        return grouped_linear(x_RH, weight_EFH, offsets_E, bias_EF)
    return _apply(matmuls, x_RH, weight_EFH, offsets_E, bias_EF)


def _apply(
    matmuls: GroupedMatmuls, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor, bias_EF: Tensor | None
) -> Tensor:
    # A view is no leaf: for a leaf, `needs_grad` cannot tell whether a pass computes its gradient.
    y_RF: Tensor = _GroupedLinear.apply(x_RH, weight_EFH.view_as(weight_EFH), offsets_E, matmuls)
    return y_RF if bias_EF is None else add_expert_biases(y_RF, bias_EF, offsets_E)


def grouped_linear_reference(x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute x W_e^T by a loop over the experts, the reference for the grouped matmul."""
    return _loop(x_RH, weight_EFH.transpose(1, 2), offsets_E)


def add_expert_biases(y_RF: Tensor, bias_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return y + b_e for the expert e of each row, [R, F]. Differentiable.

    Rows past the last offset get zeros of no expert, so that their undefined gradients reach no bias.
    """
    return y_RF + F.pad(bias_EF, (0, 0, 0, 1))[_ends_before(offsets_E, y_RF.shape[0])]


def experts_of_rows(offsets_E: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int64 [R]; the last one for rows past the last offset."""
    return _ends_before(offsets_E, rows).clamp_(max=offsets_E.shape[0] - 1)


def _ends_before(offsets_E: Tensor, rows: int) -> Tensor:
    """Return how many experts end before each row, int64 [R]: its expert, or E past the last offset."""
    numbers = torch.arange(rows, dtype=offsets_E.dtype, device=offsets_E.device)
    return torch.searchsorted(offsets_E, numbers, right=True)


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T. Backward: dx = dy W_e,  dW_e = dy_e^T x_e, zero for an expert without rows."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_EFH: Tensor, offsets_E: Tensor, matmuls: GroupedMatmuls) -> Tensor:
        ctx.matmuls = matmuls
        ctx.save_for_backward(x_RH, weight_EFH, offsets_E)
        return matmuls.output(x_RH, weight_EFH, offsets_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RH, weight_EFH, offsets_E = ctx.saved_tensors
        dy_RF, matmuls = gradients[0].contiguous(), ctx.matmuls
        dx = matmuls.input_grad(dy_RF, weight_EFH, offsets_E) if needs_grad(ctx, 0) else None
        dweight = matmuls.weight_grad(dy_RF, x_RH, offsets_E) if needs_grad(ctx, 1) else None
        return dx, dweight, None, None


def rows_times_matrices(x_RK: Tensor, matrices_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix, [R, K] x [E, K, N] -> [R, N]."""
    if (form := kernel_forms().grouped_matmul) is not None:
        return form(x_RK, matrices_EKN, offsets_E)
    if not _is_aligned(x_RK.dtype, *matrices_EKN.shape[1:]) or x_RK.shape[0] == 0:
        return _loop(x_RK, matrices_EKN, offsets_E)
    if use_fp32_matmul(x_RK):
        return F.grouped_mm(x_RK.float(), matrices_EKN.float(), offs=offsets_E).to(x_RK.dtype)
    return F.grouped_mm(x_RK, matrices_EKN, offs=offsets_E)


def columns_times_rows(dy_RF: Tensor, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply dy_e^T x_e for the rows of each expert -> [E, F, H]."""
    if (form := kernel_forms().grouped_matmul) is not None:
        return form(dy_RF.T, x_RH, offsets_E)
    if not _is_aligned(x_RH.dtype, dy_RF.shape[1], x_RH.shape[1]) or x_RH.shape[0] == 0:
        return torch.stack([dy_RF[rows].T @ x_RH[rows] for rows in _rows_of_experts(offsets_E)])
    if use_fp32_matmul(x_RH):
        return F.grouped_mm(dy_RF.float().T, x_RH.float(), offs=offsets_E).to(x_RH.dtype)
    return F.grouped_mm(dy_RF.T, x_RH, offs=offsets_E)


def _loop(x_RK: Tensor, matrices_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply the rows of one expert after the other; rows past the last offset are zeros."""
    experts = zip(_rows_of_experts(offsets_E), matrices_EKN.unbind(), strict=True)
    pieces = [x_RK[rows] @ matrix for rows, matrix in experts]
    left = x_RK.shape[0] - sum(piece.shape[0] for piece in pieces)
    return torch.cat([*pieces, x_RK.new_zeros(left, matrices_EKN.shape[2])])


def _rows_of_experts(offsets_E: Tensor) -> list[slice]:
    """Return the rows of each expert; on a GPU the host waits for the offsets."""
    ends = offsets_E.tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _is_aligned(dtype: torch.dtype, *widths: int) -> bool:
    """Return whether rows of these widths start at multiples of 16 bytes, as the grouped matmul needs."""
    return dtype in _DTYPES and all(width * dtype.itemsize % _ALIGNMENT == 0 for width in widths)
