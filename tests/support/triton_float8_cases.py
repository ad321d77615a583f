"""Cases of kernels/float8_cast_triton.py for tests/kernels/test_triton.py."""

import math
from functools import partial

import torch
from triton_comparison import randn

from megalaunch.kernels.float8_cast import (
    E4M3,
    E5M2,
    REFERENCE,
    power_of_two_scale,
    triton_kernels,
)
from megalaunch.kernels.forms import Block


def amax_case(size: tuple[int, int], device: str, dtype: torch.dtype, block: Block, transposed: bool = False) -> None:
    """Equal to the reference, bit for bit; the largest value of the last row and column is among those found."""
    x = randn(*size).to(device, dtype)
    x[-1, -1] = -9.0
    x = x.t() if transposed else x
    found = triton_kernels().amax(x, block)
    expected = REFERENCE.amax(x, block)
    assert torch.equal(found, expected), (found, expected)
    assert found[-1, -1] == 9


def special_amax_case(device: str) -> None:
    """NaN is found next to infinity; without values the amax is 0."""
    x = torch.tensor([[1.0, math.inf], [-math.nan, -math.inf], [-0.0, 0.0]], device=device)
    rows = triton_kernels().amax(x, (1, 0)).flatten().tolist()
    assert rows[0] == math.inf
    assert math.isnan(rows[1])
    assert rows[2] == 0
    assert triton_kernels().amax(x, (0, 0)).isnan().all()
    assert triton_kernels().amax(x[:0], (0, 0)).tolist() == [[0.0]]
    assert triton_kernels().amax(x[:0], (1, 0)).shape == (0, 1)


def cast_case(
    size: tuple[int, int], device: str, dtype: torch.dtype, block: Block, form: torch.dtype, transposed: bool = False
) -> None:
    """Values that fp8 holds after scaling by powers of two: equal to the reference, whatever rounds them."""
    x = randn(*size).to(E5M2).to(device, dtype)  # two bits of mantissa, as any form has
    x = x.t() if transposed else x
    scales = power_of_two_scale(REFERENCE.amax(x, block), form)
    found, expected = (kernels.cast(x, scales, block, form) for kernels in (triton_kernels(), REFERENCE))
    assert found.dtype == form
    assert found.is_contiguous()
    assert torch.equal(found.float(), expected.float())


def cast_both_case(size: tuple[int, int], device: str, form: torch.dtype, transposed: bool = False) -> None:
    """A matrix and its transpose, both contiguous."""
    x = randn(*size).to(E5M2).to(device, torch.bfloat16)
    x = x.t() if transposed else x
    scale = power_of_two_scale(REFERENCE.amax(x, (0, 0)), form)
    values, turned = triton_kernels().cast_both(x, scale, form)
    assert values.is_contiguous()
    assert turned.is_contiguous()
    expected = REFERENCE.cast(x, scale, (0, 0), form).float()
    assert torch.equal(values.float(), expected)
    assert torch.equal(turned.float(), expected.t())


def blocks_case(
    size: tuple[int, int], device: str, dtype: torch.dtype, block: Block, form: torch.dtype, transposed: bool = False
) -> None:
    """Scales and values equal to the reference's, bit for bit, also of zeros, infinity, NaN and tiny values.

    Of blocks of rows, those of the transpose too, written in the same read.
    """
    x = (randn(*size) * torch.logspace(-9, 5, size[0], dtype=torch.float64)[:, None]).to(device, dtype)
    if size[0] > 100:
        x[0], x[2, 0], x[3, -1], x[4] = 0.0, math.inf, math.nan, 1.5 * 2.0**-120
        x[5], x[6] = 448.0, torch.nextafter(x.new_tensor(448.0), x.new_tensor(math.inf))  # at a power of two for mxfp8
    x = x.t() if transposed else x
    made = []
    for kernels in (triton_kernels(), REFERENCE):
        casts = []
        for power_of_two in (False, True):
            casts.append(kernels.cast_blocks(x, block, power_of_two, form))
            if block[0] == 1:
                both = kernels.cast_blocks_both(x, block[1], power_of_two, form)
                casts += [both[:2], both[2:]]
        made.append(casts)
    for found, expected in zip(*made, strict=True):
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
        known = ~expected[0].float().isnan()  # the interpreter's conversion does not know NaN
        assert torch.equal(found[0].float()[known], expected[0].float()[known])
        assert [each.dtype for each in found] == [form, torch.float32]
        assert all(each.is_contiguous() for each in found)


def amax_with_cast_case(size: tuple[int, int], device: str, form: torch.dtype, transposed: bool = False) -> None:
    """Values, transpose and amax of one read: equal to the reference, saturated ones included."""
    x = randn(*size).to(device, torch.bfloat16)
    x = x.t() if transposed else x
    scale = torch.full((1, 1), 300.0, device=device)
    made = [
        [kernels.cast_with_amax(x, scale, form, transpose) for transpose in (False, True)]
        for kernels in (triton_kernels(), REFERENCE)
    ]
    for found, expected in zip(*made, strict=True):
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))
        assert all(one.is_contiguous() and one.dtype == other.dtype for one, other in zip(found, expected, strict=True))


def rounding_case(device: str, form: torch.dtype) -> None:
    """Equal to torch's cast: random values, ties, and those around the smallest normal one and below half a spacing."""
    form_values = torch.arange(256, dtype=torch.uint8, device=device).view(form).float()
    form_values = form_values[form_values.isfinite()].unique()
    ties = (form_values[1:] + form_values[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (-math.inf, math.inf)])
    wide = randn(70, 130).to(device, torch.float32) * torch.logspace(-9, 5, 70, device=device)[:, None]
    x = torch.cat((form_values, ties, near, wide.flatten()))[None]
    one = torch.ones(1, 1, device=device)
    found, expected = (kernels.cast(x, one, (0, 0), form) for kernels in (triton_kernels(), REFERENCE))
    assert torch.equal(found.float(), expected.float())
    assert found.float().unique().numel() == form_values.numel()


def saturation_case(device: str, form: torch.dtype) -> None:
    """Larger values become the largest; NaN stays, which the interpreter's conversion does not know."""
    largest = torch.finfo(form).max
    x = torch.tensor([[2 * largest, -math.inf, math.nan, 1.0]], device=device)
    cast = partial(triton_kernels().cast, block=(0, 0), dtype=form)
    values = cast(x, torch.ones(1, 1, device=device)).float().flatten().tolist()
    assert values[:2] == [largest, -largest]
    assert values[3] == 1
    if device == "cuda":
        assert math.isnan(values[2])
        assert cast(x, torch.zeros(1, 1, device=device)).float()[0, 1].isnan()


_BLOCKS: tuple[Block, ...] = ((0, 0), (1, 0), (1, 128), (128, 128), (1, 32), (96, 0), (1, 16))
_SIZES = ((1, 1), (130, 200), (192, 96))
FLOAT8_CASES = {
    **{
        f"amax of {block} blocks, {size} {dtype}": partial(amax_case, size, dtype=dtype, block=block)
        for block in _BLOCKS
        for size, dtype in zip(_SIZES, (torch.float32, torch.bfloat16, torch.float16), strict=True)
    },
    "amax, transposed": partial(amax_case, (130, 200), dtype=torch.bfloat16, block=(0, 0), transposed=True),
    "amax of rows, transposed": partial(amax_case, (130, 200), dtype=torch.bfloat16, block=(1, 0), transposed=True),
    "amax of infinity, NaN and nothing": special_amax_case,
    **{
        f"cast by {block} blocks, {size} {dtype}": partial(cast_case, size, dtype=dtype, block=block, form=form)
        for block in _BLOCKS
        for size, dtype, form in zip(
            _SIZES, (torch.float32, torch.bfloat16, torch.float16), (E4M3, E5M2, E4M3), strict=True
        )
    },
    "cast, transposed": partial(cast_case, (130, 200), dtype=torch.bfloat16, block=(0, 0), form=E4M3, transposed=True),
    "cast by parts of rows, transposed": partial(
        cast_case, (130, 200), dtype=torch.bfloat16, block=(1, 32), form=E4M3, transposed=True
    ),
    "cast of nothing": partial(cast_case, (0, 8), dtype=torch.bfloat16, block=(1, 0), form=E4M3),
    **{
        f"cast with its transpose, {size} {form}": partial(cast_both_case, size, form=form)
        for size, form in (((1, 70), E4M3), ((130, 200), E5M2), ((64, 128), E4M3))
    },
    "cast with its transpose, transposed": partial(cast_both_case, (130, 200), form=E4M3, transposed=True),
    **{
        f"cast of {block} blocks, {size} {dtype}": partial(blocks_case, size, dtype=dtype, block=block, form=form)
        for block in ((1, 32), (1, 128), (128, 128))
        for size, dtype, form in zip(
            _SIZES, (torch.float32, torch.bfloat16, torch.float16), (E4M3, E5M2, E4M3), strict=True
        )
    },
    "cast of blocks, transposed": partial(
        blocks_case, (130, 200), dtype=torch.float32, block=(1, 32), form=E4M3, transposed=True
    ),
    "cast of blocks of nothing": partial(blocks_case, (0, 8), dtype=torch.bfloat16, block=(1, 32), form=E4M3),
    "cast with amax": partial(amax_with_cast_case, (130, 200), form=E5M2),
    "cast with amax, transposed": partial(amax_with_cast_case, (70, 200), form=E4M3, transposed=True),
    **{f"rounding to {form}": partial(rounding_case, form=form) for form in (E4M3, E5M2)},
    **{f"saturation of {form}": partial(saturation_case, form=form) for form in (E4M3, E5M2)},
}
