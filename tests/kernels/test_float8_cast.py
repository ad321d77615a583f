"""Casts to fp8 and back: torch's casts as the reference of rounding, values by hand for scales, saturation, NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes

from megalaunch.kernels.float8_cast import (
    E4M3,
    E5M2,
    Float8Matrix,
    block_amax,
    power_of_two_scale,
    scale_from_amax,
)
from megalaunch.kernels.float8_matmul import scaled_matmul

BLOCKS = ((0, 0), (1, 0), (1, 128), (128, 128), (1, 32))
ONE = torch.ones(1, 1)


def random(rows, columns, seed=0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 2, rows).unsqueeze(1)


def cast(x, block, dtype=E4M3):
    return Float8Matrix.quantize(x, scale_from_amax(block_amax(x, block), dtype), block, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_that_of_torch(dtype):
    x = random(64, 48)
    assert torch.equal(Float8Matrix.quantize(x, ONE, (0, 0), dtype).values.float(), x.to(dtype).float())


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_large_values_saturate_and_nan_stays(dtype, largest):
    x = torch.tensor([[2 * largest, -math.inf, math.nan, 1.0]])
    values = Float8Matrix.quantize(x, ONE, (0, 0), dtype).values.float()
    assert values[0, :2].tolist() == [largest, -largest]
    assert values[0, 2].isnan()
    assert values[0, 3] == 1


@pytest.mark.parametrize("scale_of", [scale_from_amax, power_of_two_scale])
def test_scales_of_special_amaxes(scale_of):
    scales = scale_of(torch.tensor([0.0, 448.0, 1e-45, math.nan]), E4M3)
    assert scales[:2].tolist() == [1.0, 1.0]
    assert scales[2].isfinite()
    assert scales[2].reciprocal() > 0
    assert scales[3].isnan()
    infinite = Float8Matrix.quantize(
        torch.tensor([[math.inf]]), scale_of(torch.tensor([[math.inf]]), E4M3), (0, 0), E4M3
    )
    assert infinite.values.float().isnan().all(), "an infinite operand must not become a finite product"


def test_scales_by_hand():
    assert scale_from_amax(torch.tensor(7.0), E4M3) == 64
    assert scale_from_amax(torch.tensor(7.0), E4M3, margin=2) == 16
    assert scale_from_amax(torch.tensor(7.0), E5M2) == 8192
    # 448 / 5 = 89.6, and 64 is the largest power of two below
    assert power_of_two_scale(torch.tensor([5.0, 7.0, 7.5]), E4M3).tolist() == [64, 64, 32]


def test_blocks_have_scales_of_their_own():
    x = torch.zeros(130, 200)
    x[0, 0], x[129, 199] = 3.0, -5.0
    assert block_amax(x, (0, 0)).tolist() == [[5.0]]
    assert block_amax(x, (1, 0))[[0, 1, 129], 0].tolist() == [3.0, 0.0, 5.0]
    assert block_amax(x, (1, 128)).shape == (130, 2)
    assert block_amax(x, (128, 128)).tolist() == [[3.0, 0.0], [0.0, 5.0]]
    assert block_amax(x, (1, 32)).shape == (130, 7)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_value_is_at_most_half_a_step_off(block):
    x = random(130, 200)
    found = cast(x, block)
    smallest = 2.0**-9 / found.scales.min()  # the step of subnormal numbers in the block with the largest values
    assert ((found.dequantize() - x).abs() <= (x.abs() * 2**-4).clamp(min=smallest.item())).all()


def test_finer_blocks_are_closer():
    x = random(128, 256)
    errors = [float((cast(x, block).dequantize() - x).div(x).abs().mean()) for block in ((0, 0), (1, 0))]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulated_matmul_is_that_of_dequantized_fp64(block, dtype):
    a, b = cast(random(48, 160), block, dtype), cast(random(32, 160, seed=1), block)
    scales = [m.scales.double() for m in (a, b)]
    wide = []
    for matrix, scale in zip((a, b), scales, strict=True):
        rows, columns = matrix.values.shape
        height, width = block[0] or rows, block[1] or columns
        each = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        wide.append(matrix.values.double() / each)
    expected = wide[0] @ wide[1].T
    found = scaled_matmul(a, b, torch.float32, emulate=True)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("block", [(0, 0), (1, 0)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_native_matmul_is_the_emulated_one(block, dtype):
    a, b = cast(random(16, 64), block, dtype), cast(random(32, 64, seed=1), block)
    native = scaled_matmul(a, b, torch.bfloat16, emulate=False)
    emulated = scaled_matmul(a, b, torch.float32, emulate=True)
    assert native.dtype == torch.bfloat16
    assert (native.float() - emulated).abs().max() <= 2**-8 * emulated.abs().max()


def _of_blocks(scale, kind, rows, blocks):
    """The inverse scale of each 32 or 128 columns of each row, [rows, blocks], read as torch and cuBLAS document it."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    if kind == F.ScalingType.BlockWise1x128:
        return scale[row, block]
    if kind == F.ScalingType.BlockWise128x128:
        return scale[block, row // 128]
    tile = row // 128 * -(-blocks // 4) + block // 4
    return scale.float()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]


@pytest.mark.parametrize(("rows", "others", "columns"), [(256, 384, 640), (128, 128, 128)])
@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), ((1, 128), (1, 128)), ((1, 32), (1, 32))], ids=str)
def test_native_scales_of_parts_of_rows_have_the_layout_that_torch_documents(
    blocks, rows, others, columns, monkeypatch
):
    """No CPU multiplies them: torch's own checks of shapes, strides and dtypes, and the values at documented places."""
    scale_of = power_of_two_scale if blocks[0] == (1, 32) else scale_from_amax
    a, b = (
        Float8Matrix.quantize(x, scale_of(block_amax(x, block), E4M3), block, E4M3)
        for x, block in zip((random(rows, columns), random(others, columns, seed=1)), blocks, strict=True)
    )
    scaled_mm = F.scaled_mm

    def as_documented(left, right, scale_a, kind_a, scale_b, kind_b, **options):
        tensors = [tensor.to("meta") for tensor in (left, right, scale_a, scale_b)]
        assert scaled_mm(*tensors[:3], kind_a, tensors[3], kind_b, **options).shape == (rows, others)
        width = blocks[0][1]
        inverse = [
            _of_blocks(scale, kind, matrix.shape[0], columns // width).repeat_interleave(width, 1)
            for scale, kind, matrix in ((scale_a, kind_a, left), (scale_b, kind_b, right.t()))
        ]
        return (left.float() * inverse[0]) @ (right.t().float() * inverse[1]).T

    monkeypatch.setattr(F, "scaled_mm", as_documented)
    native = scaled_matmul(a, b, torch.bfloat16, emulate=False, fast_accumulation=True)
    assert torch.equal(native, scaled_matmul(a, b, torch.float32, emulate=True))


def test_exponents_of_mxfp8_reach_its_ends_and_keep_nan(monkeypatch):
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 1e-38, 3e38, math.nan
    scales = power_of_two_scale(block_amax(x, (1, 32)), E4M3)
    matrix = Float8Matrix.quantize(x, scales, (1, 32), E4M3)
    given = []
    monkeypatch.setattr(F, "scaled_mm", lambda *arguments, **options: given.append(arguments[2]))
    scaled_matmul(matrix, matrix, torch.bfloat16, emulate=False)
    exponents = given[0].float()[[0, 16, 32]]
    assert exponents[:2].tolist() == [2.0**-126, 2.0**120]
    assert exponents[2].isnan()
    assert matrix.values[2].float().isnan()[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_one_copy_in_fp32_at_a_time(block):
    """Of a cast, of a matrix or its transpose, and of the way back; and casts leave what they cast as it was."""
    x = random(256, 256)
    scales = scale_from_amax(block_amax(x.t(), block), E4M3)
    with LiveBytes() as casting:
        matrix = Float8Matrix.quantize(x.t(), scales, block, E4M3)
    with LiveBytes() as dequantizing:
        matrix.dequantize()
    assert casting.peak < 1.6 * 4 * x.numel()
    assert dequantizing.peak < 1.1 * 4 * x.numel()
    assert torch.equal(x, random(256, 256))
