"""The router's linear layer: bit for bit that of cast operands, with less saved for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.moe.router_linear import router_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_cast_operands(dtype, with_bias):
    torch.manual_seed(0)
    shapes = [(24, 16), (5, 16), *([(5,)] if with_bias else [])]
    given = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    upstream = torch.randn(24, 5, dtype=dtype)

    def run(function) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = function(*leaves)
        out.backward(upstream)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def plain(*leaves: Tensor) -> Tensor:
        return F.linear(*(leaf.to(dtype) for leaf in leaves))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return router_linear(x, weight, bias, dtype)

    for found, expected in zip(run(ours), run(plain), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_input_is_saved_as_it_is():
    x, weight = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        router_linear(x, weight, None, torch.float32)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), weight.data_ptr()]
