"""Linear layers and experts in emulated fp8 against torchao's on the same values: outputs and both gradients.

Both sides multiply the same fp8 numbers in fp32 and differ by the order of sums, which rounds a result in bf16 to its
neighbour now and then. One value that was cast to another fp8 number would be off by a step of 2^-4 or more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.kernels.grouped_linear import grouped_linear_by
from megalaunch.kernels.linear_matmuls import linear_by
from megalaunch.schema.precision import Float8Spec

REASON = "torchao (the extra `parity`) is not installed"
torchao = pytest.importorskip("torchao.float8", reason=REASON)
float8_linear = pytest.importorskip("torchao.float8.float8_linear", reason=REASON)
mxfp8_linear = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason=REASON)
mxfp8_grouped = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm", reason=REASON)

EMULATED, RCEIL = mxfp8_linear.KernelPreference.EMULATED, mxfp8_linear.ScaleCalculationMode.RCEIL
ENDS = (64, 64, 96, 192)  # rows of experts in blocks of 32, as torchao wants them; the second expert has none


def torchao_linear(name, x, weight):
    """torchao's layer; its recipe `rowwise` rounds scales to powers of two, for which there is a switch."""
    if name == "mxfp8":
        return mxfp8_linear._to_mxfp8_then_scaled_mm(x, weight, EMULATED, RCEIL)
    recipe = torchao.Float8LinearConfig.from_recipe_name(name)
    config = replace(recipe, emulate=True, round_scales_to_power_of_2=False)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer = float8_linear.Float8Linear.from_float(layer, config=config)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


def torchao_experts(x, weight, offsets):
    return mxfp8_grouped._to_mxfp8_then_scaled_grouped_mm(
        x, weight.transpose(1, 2), offs=offsets, kernel_preference=EMULATED, scale_calculation_mode=RCEIL
    )


def values(*shape, seed):
    """Rows of magnitudes from 1e-3 to 10, in bf16."""
    scale = torch.logspace(-3, 1, shape[-2])[:, None]
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def with_gradients(layer, *leaves, gradient):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = layer(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, gradient)


def assert_same(found, expected):
    for name, mine, other in zip(("y", "dx", "dW"), found, expected, strict=True):
        mine, other = mine.float(), other.float()
        neighbours = (mine - other).abs() <= 2**-7 * other.abs() + 1e-6 * other.abs().max()
        assert neighbours.all(), f"{name}: {int((~neighbours).sum())} of {mine.numel()} values are no neighbours"
        assert (mine != other).float().mean() < 0.001, name


@pytest.mark.parametrize(("name", "format"), [("tensorwise", "hybrid"), ("rowwise", "e4m3"), ("mxfp8", "e4m3")])
def test_a_linear_layer_is_that_of_torchao(name, format):
    x, weight, dy = values(2, 64, 160, seed=0), values(96, 160, seed=1), values(2, 64, 96, seed=2)
    matmuls = Float8Matmuls(Float8Spec(recipe=name, format=format), True, lambda dims, amax: amax, None)
    found = with_gradients(lambda *leaves: linear_by(matmuls, *leaves), x, weight, gradient=dy)
    expected = with_gradients(lambda *leaves: torchao_linear(name, *leaves), x, weight, gradient=dy)
    assert_same(found, expected)


def test_experts_in_mxfp8_are_those_of_torchao():
    x, weight, dy = values(ENDS[-1], 96, seed=0), values(len(ENDS), 64, 96, seed=1), values(ENDS[-1], 64, seed=2)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    matmuls = Float8GroupedMatmuls(Float8Spec(recipe="mxfp8", format="e4m3"), True, lambda dims, amax: amax, None)
    found = with_gradients(lambda *leaves: grouped_linear_by(matmuls, *leaves, offsets), x, weight, gradient=dy)
    expected = with_gradients(lambda *leaves: torchao_experts(*leaves, offsets), x, weight, gradient=dy)
    assert_same(found, expected)
