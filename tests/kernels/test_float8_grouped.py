"""The fp8 products of experts against one product per expert in fp64, and what the native operator is given."""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels import float8_grouped, float8_operators
from megalaunch.kernels.float8_cast import E4M3, E5M2, Float8Matrix, block_amax, scale_from_amax
from megalaunch.kernels.float8_grouped import PaddedGroups, scaled_columns_times_rows, scaled_rows_times_matrices

OFFSETS = torch.tensor([5, 5, 40, 61], dtype=torch.int32)  # the second expert has no row
ROWS, EXPERTS, N, K = 67, 4, 32, 48  # six rows belong to no expert


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 1, shape[0])[:, None]


def cast(x, block, dtype=E4M3):
    return Float8Matrix.quantize(x, scale_from_amax(block_amax(x, block), dtype), block, dtype)


def test_padded_groups_start_at_whole_blocks():
    groups = PaddedGroups.of(OFFSETS, ROWS, 16)
    assert groups.offsets_E.tolist() == [16, 32, 80, 112]
    assert groups.expert_of_block.tolist()[:7] == [0, 1, 2, 2, 2, 3, 3]
    rows = torch.arange(1.0, ROWS + 1)[:, None]
    padded = groups.pad(rows)
    assert padded.shape == ((-(-ROWS // 16) + EXPERTS) * 16, 1)
    expected = torch.zeros_like(padded)
    for (start, end), place in zip(pairwise([0, *OFFSETS.tolist()]), [0, 16, 32, 80], strict=True):
        expected[place : place + end - start] = rows[start:end]
    assert torch.equal(padded, expected), "rows past the last offset are dropped"


@pytest.mark.parametrize("weight_block", [(N, 0), (1, 0), (16, 16), (1, 32)])
def test_rows_times_matrices(weight_block):
    a = cast(random(ROWS, K), (1, 0), E5M2)
    b = cast(random(EXPERTS * N, K, seed=1), weight_block)
    found = scaled_rows_times_matrices(a, b, OFFSETS, torch.float32, emulate=True)
    wide_a, wide_b = a.dequantize().double(), b.dequantize().double().view(EXPERTS, N, K)
    for e, (start, end) in enumerate(pairwise([0, *OFFSETS.tolist()])):
        expected = wide_a[start:end] @ wide_b[e].T
        assert (
            (found[start:end] - expected).abs().max().nan_to_num(0) <= 1e-6 * wide_a.abs().max() * 100
            if end > start
            else True
        )
        torch.testing.assert_close(found[start:end].double(), expected, rtol=1e-5, atol=1e-5)
    empty = Float8Matrix(a.values[:0], a.scales[:0], a.block)
    assert scaled_rows_times_matrices(empty, b, OFFSETS * 0, torch.float32, emulate=True).shape == (0, N)


@pytest.mark.parametrize("height", [0, 1])
def test_columns_times_rows(height):
    groups = PaddedGroups.of(OFFSETS, ROWS, 16)
    x, dy = random(ROWS, K), random(ROWS, N, seed=1)
    a, b = (cast(groups.pad(rows).t(), (height, 16)) for rows in (dy, x))
    found = scaled_columns_times_rows(a, b, groups, torch.float32, width=0, emulate=True)
    wide_a, wide_b = a.dequantize().double(), b.dequantize().double()
    for e, (start, end) in enumerate(pairwise([0, *groups.offsets_E.tolist()])):
        torch.testing.assert_close(
            found[e].double(), wide_a[:, start:end] @ wide_b[:, start:end].T, rtol=1e-5, atol=1e-5
        )
    assert not found[1].any(), "an expert without rows"


def as_torch_does(a, b, scale_a, recipe_a, scale_b, recipe_b, offs, output_dtype, use_fast_accum):
    """Check the arguments by torch's rule for the older operator, and multiply what they stand for."""
    assert recipe_a == recipe_b == F.ScalingType.RowWise
    on_meta = [tensor.to("meta") for tensor in (a, b, scale_a, scale_b, offs)]
    shape = torch._scaled_grouped_mm(*on_meta, out_dtype=output_dtype, use_fast_accum=use_fast_accum).shape
    pairs = list(enumerate(pairwise([0, *offs.tolist()])))
    if b.ndim == 3:
        wide_a, wide_b = a.float() * scale_a[:, None], b.float() * scale_b[:, None, :]
        out = torch.zeros(shape)
        for e, (start, end) in pairs:
            out[start:end] = wide_a[start:end] @ wide_b[e]
        return out.to(output_dtype)
    assert all(end % 16 == 0 and end > start for _, (start, end) in pairs), "sums start at 16 bytes, none is empty"
    scales_a, scales_b = scale_a.view(len(offs), -1, 1), scale_b.view(len(offs), 1, -1)
    pieces = [scales_a[e] * (a[:, i:j].float() @ b[i:j].float()) * scales_b[e] for e, (i, j) in pairs]
    return torch.stack(pieces).to(output_dtype)


@pytest.mark.parametrize("height", [0, 1], ids=["a scale for an expert", "scales of rows"])
def test_the_native_products_are_the_emulated_ones(height, monkeypatch):
    """The arguments follow the contract of torch's operator, which only a GPU has."""
    monkeypatch.setattr(float8_grouped, "_operator", lambda: as_torch_does)
    b = cast(random(EXPERTS * N, K, seed=1), (1 if height else N, 0))
    groups, x, dy = PaddedGroups.of(OFFSETS, ROWS, 16), random(ROWS, K), random(ROWS, N, seed=1)
    columns, scales = [groups.pad(rows).t() for rows in (dy, x)], []
    ends = groups.offsets_E.tolist()
    for x_KP in columns:
        amaxes = [block_amax(x_KP[:, start:end], (height, 0))[:, 0] for start, end in pairwise([0, *ends])]
        scales.append(scale_from_amax(torch.stack(amaxes), E4M3)[groups.expert_of_block].t())
    left, right = (Float8Matrix.quantize(x, s, (height, 16), E4M3) for x, s in zip(columns, scales, strict=True))
    for product, arguments, kept in (
        (scaled_rows_times_matrices, (cast(x, (1, 0)), b, OFFSETS), slice(61)),
        (partial(scaled_columns_times_rows, width=0), (left, right, groups), slice(None)),
    ):
        native = product(*arguments, torch.bfloat16, emulate=False)[kept]
        emulated = product(*arguments, torch.float32, emulate=True)[kept]
        assert native.dtype == torch.bfloat16
        assert (native.float() - emulated).abs().max() <= 2**-8 * emulated.abs().max()


def test_a_torch_without_the_operator_is_named(monkeypatch):
    monkeypatch.delattr(F, "scaled_grouped_mm")
    float8_grouped._operator.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"has no torch\.nn\.functional\.scaled_grouped_mm, which experts in fp8 need"
    ):
        float8_grouped._operator()
    float8_grouped._operator.cache_clear()


def test_products_that_torch_does_not_multiply_name_triton_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "megalaunch.kernels.float8_grouped_triton", None)  # as if its import failed
    a, b = cast(random(ROWS, K), (1, 0), E5M2), cast(random(EXPERTS * N, K), (1, 0))
    with pytest.raises(RuntimeError, match=r"experts in fp8 need Triton \(.*\): install it, or set precision"):
        scaled_rows_times_matrices(a, b, OFFSETS, torch.float32, emulate=False)


@pytest.mark.parametrize(
    ("capability", "by_torch"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_gpus_that_torchs_operator_is_not_for_have_the_kernel(capability, by_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    float8_grouped._torch_runs_on.cache_clear()
    assert float8_grouped._torch_runs_on(torch.device("cuda", 0)) == by_torch
    float8_grouped._torch_runs_on.cache_clear()


def test_without_torchs_operator_every_product_is_the_kernels(monkeypatch):
    """Matrices in e4m3 with scales of rows, which torch's operator takes elsewhere."""
    called = []
    monkeypatch.setattr(float8_grouped, "_torch_runs_on", lambda device: False)
    for name in ("float8_rows_times_matrices", "float8_columns_times_rows"):
        monkeypatch.setattr(float8_operators, name, lambda *arguments, name=name: called.append(name))
    groups, x, dy = PaddedGroups.of(OFFSETS, ROWS, 16), random(ROWS, K), random(ROWS, N, seed=1)
    scaled_rows_times_matrices(
        cast(x, (1, 0)), cast(random(EXPERTS * N, K), (1, 0)), OFFSETS, torch.bfloat16, emulate=False
    )
    left, right = (cast(groups.pad(rows).t(), (1, 16)) for rows in (dy, x))
    scaled_columns_times_rows(left, right, groups, torch.bfloat16, width=0, emulate=False)
    assert called == ["float8_rows_times_matrices", "float8_columns_times_rows"]
