"""Products of the grouped linear layer in fp8: on fp8 units, and their emulation in fp32.

torch's scaled grouped matmul takes matrices in e4m3 with one inverse scale for each row of the left and each column of
the right matrix. One scale for an expert is passed as equal scales of its rows. A Triton kernel multiplies the others:
matrices with scales of parts of rows, and gradients in e5m2; and all matrices on GPUs that torch's operator is not for.
Shapes: R rows in the order of their experts, E experts, K the dim that a product sums over, P padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megalaunch.kernels.float8_cast import E4M3, Float8Matrix
from megalaunch.kernels.grouped_linear import columns_times_rows, experts_of_rows, rows_times_matrices


@dataclass(frozen=True)
class PaddedGroups:
    """Where rows go so that each expert's start at a multiple of `width`: then no block along them has two experts.

    Each expert has at least `width` rows, all of them padding if it has no row of its own: a product over no rows would
    be left undefined by a GPU.

    Attributes:
        places_R: The new place of each row; P for rows past the last offset, which belong to no expert.
        offsets_E: int32; the padded rows of expert e end before offsets[e].
        expert_of_block: The expert of each `width` padded rows.
        width: Rows of a block; a multiple of 16, for the alignment of memory, if the product is native.
    """

    places_R: Tensor
    offsets_E: Tensor
    expert_of_block: Tensor
    width: int

    @classmethod
    def of(cls, offsets_E: Tensor, rows: int, width: int) -> PaddedGroups:
        """Plan the padding of `rows` rows, without reading a value on the host."""
        experts = offsets_E.shape[0]
        starts_E = F.pad(offsets_E[:-1], (1, 0))
        blocks_E = ((offsets_E - starts_E + width - 1) // width).clamp(min=1)
        ends_E = (blocks_E * width).cumsum(0).to(torch.int32)
        shifts_E = (ends_E - blocks_E * width - starts_E).long()
        numbers = torch.arange(rows, device=offsets_E.device)
        most_blocks = -(-rows // width) + experts
        places_R = (numbers + shifts_E[experts_of_rows(offsets_E, rows)]).where(
            numbers < offsets_E[-1], most_blocks * width
        )
        return cls(places_R, ends_E, experts_of_rows(ends_E // width, most_blocks), width)

    def pad(self, x_RK: Tensor) -> Tensor:
        """Return the rows at their places, [R, K] -> [P, K]; others are 0."""
        padded = x_RK.new_zeros(self.expert_of_block.shape[0] * self.width + 1, x_RK.shape[1])
        return padded.index_copy_(0, self.places_R, x_RK)[:-1]

    def unpad(self, x_PK: Tensor) -> Tensor:
        """Return the rows from their places, [P, K] -> [R, K]; undefined past the last offset."""
        return x_PK.index_select(0, self.places_R.clamp(max=x_PK.shape[0] - 1))


def padded_counts(counts: Sequence[int], width: int) -> list[int]:
    """Return the padded rows of experts with `counts` rows, as `PaddedGroups` has them."""
    return [max(1, -(-count // width)) * width for count in counts]


def scaled_rows_times_matrices(
    a_RK: Float8Matrix, b: Float8Matrix, offsets_E: Tensor, dtype: torch.dtype, *, emulate: bool, fast: bool = False
) -> Tensor:
    """Return a b_e^T for the expert e of each row, [R, K] x [E N, K] -> [R, N] in `dtype`.

    Args:
        a_RK: The rows.
        b: The experts' matrices [N, K], one below the other.
        offsets_E: int32; the rows of expert e end before offsets[e].
        dtype: Of the result; bf16 for the native product.
        emulate: Multiply in fp32.
        fast: Fast accumulation, see `scaled_matmul`.
    """
    experts, (height, width) = offsets_E.shape[0], b.block
    if emulate:
        matrices_EKN = b.dequantize().view(experts, -1, b.values.shape[1]).transpose(1, 2)
        return rows_times_matrices(a_RK.dequantize(), matrices_EKN, offsets_E).to(dtype)
    matrices_EKN = b.values.view(experts, -1, b.values.shape[1]).transpose(1, 2)
    if a_RK.values.shape[0] == 0:
        return a_RK.scales.new_empty(0, matrices_EKN.shape[2], dtype=dtype)
    if not _torch_multiplies(a_RK, b, width):
        from megalaunch.kernels import float8_operators

        product: Tensor = float8_operators.float8_rows_times_matrices(
            a_RK.values, a_RK.scales, b.values, b.scales, offsets_E, height, width, dtype, fast
        )
        return product
    inverse_b_EN = b.scales.reciprocal().repeat_interleave(b.block[0], dim=0).view(experts, -1)
    found: Tensor = _scaled_grouped_mm(
        a_RK.values, matrices_EKN, a_RK.scales.reciprocal().view(-1), inverse_b_EN, offsets_E, fast
    )
    return found


def scaled_columns_times_rows(
    a_MP: Float8Matrix, b_NP: Float8Matrix, groups: PaddedGroups, dtype: torch.dtype, *, width: int, emulate: bool
) -> Tensor:
    """Return a_e b_e^T over the padded rows of each expert, [M, P] x [N, P] -> [E, M, N] in `dtype`.

    Args:
        a_MP: The left matrix, with scales [M or 1, P / width].
        b_NP: The right matrix, transposed, with scales [N or 1, P / width].
        groups: Which of the P padded rows belong to which expert.
        dtype: Of the result; bf16 for the native product.
        width: Padded rows that have a scale of their own; 0: those of an expert share their scales.
        emulate: Multiply in fp32.
    """
    if emulate:
        return columns_times_rows(a_MP.dequantize().T, b_NP.dequantize().T, groups.offsets_E).to(dtype)
    last_blocks_E = groups.offsets_E.long() // groups.width - 1
    a_scales, b_scales = (
        (m.scales if width else m.scales[:, last_blocks_E]).expand(m.values.shape[0], -1) for m in (a_MP, b_NP)
    )
    if not _torch_multiplies(a_MP, b_NP, width):
        from megalaunch.kernels import float8_operators

        product: Tensor = float8_operators.float8_columns_times_rows(
            a_MP.values, a_scales, b_NP.values, b_scales, groups.offsets_E, width, dtype
        )
        return product
    inverse = [scales.reciprocal().t().reshape(-1) for scales in (a_scales, b_scales)]
    found: Tensor = _scaled_grouped_mm(a_MP.values, b_NP.values.t(), *inverse, groups.offsets_E, False)
    return found


def _torch_multiplies(a: Float8Matrix, b: Float8Matrix, width: int) -> bool:
    """Return whether torch's operator takes these matrices on their device."""
    return not width and a.values.dtype == b.values.dtype == E4M3 and _torch_runs_on(a.values.device)


@cache
def _torch_runs_on(device: torch.device) -> bool:
    """Return whether torch's operator is for a device: of NVIDIA's GPUs Hopper and compute capability 10 have it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _operator() -> Any:
    """Return torch's scaled grouped matmul. Raises RuntimeError if this torch has none."""
    operator = getattr(F, "scaled_grouped_mm", None)
    if operator is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm, which experts in fp8 need: "
            "update torch, or set precision.emulate=true"
        )
    return operator


@torch.library.custom_op("megalaunch::scaled_grouped_mm", mutates_args=())
def _scaled_grouped_mm(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, offsets_E: Tensor, fast: bool
) -> Tensor:
    """Call torch's operator, which has no rule for the shape of its result: graphs and simulations need one."""
    found: Tensor = _operator()(
        a,
        b,
        inverse_a,
        ScalingType.RowWise,
        inverse_b,
        ScalingType.RowWise,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return found


@_scaled_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, offsets_E: Tensor, fast: bool) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.ndim == 3 else (offsets_E.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=torch.bfloat16)
