"""The fp8 matmuls of one linear layer and of experts: against fp64, and compiled against eager ones.

The expected numbers are products in fp64 of values that are rounded here, by the definition of the formats.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import pytest
import torch
from slow_cases import slow_but
from torch.utils.checkpoint import checkpoint

from megalaunch.engine.precision.amax_history import AmaxHistories
from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.kernels.float8_cast import E4M3, E5M2, REFERENCE
from megalaunch.kernels.forms import CastKernels, KernelForms, use_kernel_forms
from megalaunch.kernels.grouped_linear import grouped_linear_by
from megalaunch.kernels.linear_matmuls import linear_by
from megalaunch.schema.precision import Float8Spec

FORMATS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}  # largest value, bits of mantissa, smallest exponent
BLOCKS = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (1, 0)),
    "blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
}  # of activations and gradients, of weights


def one_process(dims, amax):
    return amax


def rounded(x, format, block, power_of_two):
    """The values of a matrix after a cast to fp8 and back, in fp64; one scale a block, of rows and of columns."""
    largest, mantissa, smallest = FORMATS[format]
    found = torch.empty(x.shape, dtype=torch.float64)
    height, width = block[0] or x.shape[0], block[1] or x.shape[1]
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            part = slice(row, row + height), slice(column, column + width)
            amax = x[part].float().abs().max()
            scale = torch.tensor(largest) / amax
            if power_of_two:
                scale = scale.log2().floor().exp2()
            scaled = (x[part].float() * scale).double()
            step = torch.exp2(scaled.abs().log2().floor().clamp(min=smallest) - mantissa)
            found[part] = (scaled / step).round() * step / scale.double()
    return found


def with_gradients(layer, *leaves, gradient):
    """The output of a layer, and the gradients of its input and of its weight."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = layer(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, gradient)


def assert_close(found, expected, rtol):
    """In fp64; what cancels has the error of its terms."""
    for each, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), exact, rtol=rtol, atol=float(1e-6 * exact.abs().max()))


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("format", ["e4m3", "hybrid"])
def test_a_layer_is_that_of_rounded_values_in_fp64(recipe, format):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(64, 160), torch.randn(48, 160), torch.randn(64, 48)
    matmuls = Float8Matmuls(Float8Spec(recipe=recipe, format=format), True, one_process, None)
    found = with_gradients(lambda *leaves: linear_by(matmuls, *leaves), x, weight, gradient=dy)
    activations, weights = BLOCKS[recipe]
    of_gradient = "e5m2" if format == "hybrid" else "e4m3"

    def cast(matrix, format="e4m3", block=activations):
        return rounded(matrix, format, block, recipe == "mxfp8")

    expected = (
        cast(x) @ cast(weight, block=weights).T,
        cast(dy, of_gradient) @ cast(weight.T, block=weights).T,
        cast(dy.T, of_gradient) @ cast(x.T).T,
    )
    assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "reads"),
    [
        ("tensorwise", ["amax", "cast_both"]),
        ("rowwise", ["amax", "cast", "amax", "cast"]),
        ("blockwise", ["cast_blocks_both"]),
        ("mxfp8", ["cast_blocks_both"]),
    ],
)
def test_a_gradient_is_read_once_for_both_matmuls_where_its_scales_allow_it(recipe, reads):
    """By an operator each; the values are those of `test_a_layer_is_that_of_rounded_values_in_fp64`."""
    x, weight, dy = torch.randn(64, 160), torch.randn(48, 160), torch.randn(64, 48)
    found = []

    def noting(name, operator):
        def call(matrix, *arguments):
            if matrix.data_ptr() == dy.data_ptr():
                found.append(name)
            return operator(matrix, *arguments)

        return call

    forms = CastKernels(**{each.name: noting(each.name, getattr(REFERENCE, each.name)) for each in fields(REFERENCE)})
    matmuls = Float8Matmuls(Float8Spec(recipe=recipe), True, one_process, None)
    with use_kernel_forms(KernelForms(cast_kernels=forms)):
        with_gradients(lambda *leaves: linear_by(matmuls, *leaves), x, weight, gradient=dy)
    assert found == reads


@pytest.mark.parametrize("recipe", BLOCKS)
def test_weight_gradients_in_16_bits_are_of_the_operands_themselves(recipe):
    """With `precision.fp8.wgrad=false`: nothing but the result is rounded, and the other matmuls are in fp8."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(96, 160).bfloat16(), torch.randn(48, 160).bfloat16(), torch.randn(96, 48).bfloat16()
    ends = torch.tensor([32, 96], dtype=torch.int32)
    found, experts = [], []
    for wgrad in (True, False):
        settings = Float8Spec(recipe=recipe, wgrad=wgrad)
        one = partial(linear_by, Float8Matmuls(settings, True, one_process, None))
        found.append(with_gradients(one, x, weight, gradient=dy))
        grouped = Float8GroupedMatmuls(settings, True, one_process, None)
        several = partial(grouped_linear_by, grouped, offsets_E=ends)
        experts.append(with_gradients(several, x, torch.stack((weight, -weight)), gradient=dy))
    exact = dy.double().T @ x.double()
    of_experts = torch.stack([dy[rows].double().T @ x[rows].double() for rows in (slice(0, 32), slice(32, 96))])
    for (in_fp8, in_16_bits), expected in ((found, exact), (experts, of_experts)):
        assert torch.equal(in_16_bits[0], in_fp8[0])
        assert torch.equal(in_16_bits[1], in_fp8[1])
        assert_close(in_16_bits[2:], (expected,), rtol=2**-8)
        assert float((in_fp8[2].double() - expected).norm() / expected.norm()) > 0.01, "fp8 has 3 or 2 bits of mantissa"


@pytest.mark.parametrize(
    ("recipe", "emulate"),
    slow_but(
        [("tensorwise", False), ("rowwise", False), ("blockwise", True), ("mxfp8", True)],
        ("tensorwise", False),
    ),
)
def test_a_compiled_layer_has_the_numbers_of_an_eager_one(recipe, emulate):
    matmuls = Float8Matmuls(Float8Spec(recipe=recipe), emulate, one_process, None)
    torch.manual_seed(0)
    x, weight = torch.randn(32, 160).bfloat16(), torch.randn(48, 160).bfloat16()

    def gradients(layer):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = layer(matmuls, *leaves)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    compiled = torch.compile(linear_by, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled), gradients(linear_by), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("recompute", slow_but([False, True], False))
def test_compiled_layers_with_delayed_scales_record_what_eager_ones_do(recompute):
    """Three steps of two microbatches whose passes alternate as in a pipeline, by two layers that share a graph."""

    def numbers(compiles):
        histories = AmaxHistories({"a": None, "b": None}, 2, (E4M3, E4M3, E5M2), 0, torch.device("cpu"))
        settings = Float8Spec(recipe="delayed")
        layers = [Float8Matmuls(settings, True, one_process, histories.of_layer(name)) for name in ("a", "b")]
        torch.manual_seed(0)
        weights = [torch.randn(32, 32).bfloat16().requires_grad_() for _ in layers]

        def layer(matmuls, x, weight):
            if recompute:
                return checkpoint(linear_by, matmuls, x, weight, use_reentrant=False)
            return linear_by(matmuls, x, weight)

        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
        found = []
        for _ in range(3):
            histories.begin_step()
            outputs = []
            for _ in range(2):
                y = torch.randn(16, 32).bfloat16().requires_grad_()
                for matmuls, weight in zip(layers, weights, strict=True):
                    y = call(matmuls, y, weight)
                outputs.append(y)
            for y in outputs:
                y.square().sum().backward()
            histories.end_step(lambda amax: amax)
            found += [*outputs, *(weight.grad.clone() for weight in weights), histories.scale_n3.clone()]
        return [*found, *histories.states().values()]

    found, expected = numbers(True), numbers(False)
    assert (expected[-1] > 0).all()
    assert all(map(torch.equal, found, expected))
