"""Cases of kernels/float8_grouped_triton.py for tests/kernels/test_triton.py."""

from functools import partial
from itertools import pairwise

import torch
from triton_comparison import compare, randn

from megalaunch.kernels.float8_cast import E4M3, E5M2, Float8Matrix, scale_from_amax
from megalaunch.kernels.float8_grouped import PaddedGroups, scaled_columns_times_rows, scaled_rows_times_matrices

OFFSETS = {
    "an expert without rows": [5, 5, 140, 161],
    "all rows with one": [0, 0, 300],
    "no rows": [0, 0],
}
BEHIND = 6  # rows that belong to no expert


def _cast(x: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> Float8Matrix:
    """Cast on the CPU, by torch: values and scales are what the products are given."""
    return Float8Matrix.quantize_blocks(x, (height, width or x.shape[1]), dtype, power_of_two=False)


def _move(matrix: Float8Matrix, width: int, device: str) -> Float8Matrix:
    return Float8Matrix(matrix.values.to(device), matrix.scales.to(device), (matrix.block[0], width))


def rows_case(
    ends: list[int],
    device: str,
    *,
    sizes: tuple[int, int],
    height: int,
    width: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out: torch.dtype = torch.float32,
    fast: bool = False,
) -> None:
    """Rows of experts times their matrices, with rows of very different sizes."""
    (n, k), experts, rows = sizes, len(ends), ends[-1] + BEHIND
    x = randn(rows, k).float() * torch.logspace(-2, 1, rows)[:, None]
    a, b = _cast(x, 1, width, dtypes[0]), _cast(randn(experts * n, k, seed=1).float(), height, width, dtypes[1])
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    moved = [_move(matrix, width, device) for matrix in (a, b)]
    found = scaled_rows_times_matrices(*moved, offsets, out, emulate=False, fast=fast)
    assert (found.shape, found.dtype) == ((rows, n), out)
    wide_a, wide_b = a.dequantize().double(), b.dequantize().double().view(experts, n, k)
    expected = [wide_a[start:end] @ wide_b[e].T for e, (start, end) in enumerate(pairwise([0, *ends]))]
    compare([found[: ends[-1]].cpu()], [torch.cat(expected)], out)


def columns_case(
    ends: list[int],
    device: str,
    *,
    sizes: tuple[int, int],
    width: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out: torch.dtype = torch.float32,
    height: int = 1,
) -> None:
    """Products over the rows of each expert; without a width an expert has scales of its own, or one scale."""
    (m, n), rows = sizes, ends[-1] + BEHIND
    groups = PaddedGroups.of(torch.tensor(ends, dtype=torch.int32), rows, width or 16)
    padded = groups.offsets_E.tolist()
    matrices = []
    for number, (size, dtype) in enumerate(zip((m, n), dtypes, strict=True)):
        x = groups.pad(randn(rows, size, seed=number).float()).t().contiguous()
        if width:
            matrices.append(_cast(x, 1, width, dtype))
            continue
        amaxes = [x[:, start:end].abs().amax(1 if height else (0, 1)).view(-1) for start, end in pairwise([0, *padded])]
        scales = scale_from_amax(torch.stack(amaxes, 1), dtype)[:, groups.expert_of_block]
        matrices.append(Float8Matrix.quantize(x, scales, (height, groups.width), dtype))
    wide_a, wide_b = (matrix.dequantize().double() for matrix in matrices)
    moved = [Float8Matrix(each.values.to(device), each.scales.to(device), each.block) for each in matrices]
    places = PaddedGroups.of(torch.tensor(ends, dtype=torch.int32, device=device), rows, groups.width)
    found = scaled_columns_times_rows(*moved, places, out, width=width, emulate=False)
    assert (found.shape, found.dtype) == ((len(ends), m, n), out)
    expected = [wide_a[:, start:end] @ wide_b[:, start:end].T for start, end in pairwise([0, *padded])]
    compare([found.cpu()], [torch.stack(expected)], out)


GROUPED_CASES = {
    **{
        f"rows times matrices, {name}, {width}": partial(
            rows_case, ends, sizes=(144, 160), height=height, width=width, dtypes=(E5M2, E4M3)
        )
        for name, ends in OFFSETS.items()
        for height, width in ((144, 0), (1, 32))
    },
    "rows times matrices, square blocks": partial(
        rows_case, [5, 5, 140, 161], sizes=(256, 384), height=128, width=128, out=torch.bfloat16
    ),
    "rows times matrices, fast": partial(
        rows_case, [5, 40], sizes=(16, 272), height=1, width=0, dtypes=(E4M3, E5M2), fast=True
    ),
    **{
        f"columns times rows, {name}, {width}": partial(columns_case, ends, sizes=(144, 48), width=width)
        for name, ends in OFFSETS.items()
        for width in (32, 128)
    },
    **{
        f"columns times rows, scales of experts, {height}": partial(
            columns_case, [5, 5, 140, 161], sizes=(144, 48), width=0, height=height, dtypes=(E5M2, E4M3), out=out
        )
        for height, out in ((0, torch.float32), (1, torch.bfloat16))
    },
}
