"""The fp8 matmuls of one linear layer: compiled, against eager ones."""

from __future__ import annotations

import pytest
import torch
from slow_cases import slow_but

from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.kernels.linear_matmuls import linear_by
from megalaunch.schema.precision import Float8Spec


def one_process(dims, amax):
    return amax


@pytest.mark.parametrize(
    ("recipe", "emulate"),
    slow_but(
        [("tensorwise", False), ("rowwise", False), ("blockwise", True), ("mxfp8", True)],
        ("tensorwise", False),
        ("mxfp8", True),
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
