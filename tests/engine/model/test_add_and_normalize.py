"""The residual addition and the norm after it as one operator: where it is used, and where it must not be."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.layers import Norm, add_and_normalize
from megalaunch.kernels import overridable
from megalaunch.kernels.add_norm import add_norm_reference
from megalaunch.platform import overrides
from megalaunch.platform.overrides import Override


@pytest.fixture
def calls(monkeypatch):
    """Replace the operator on the CPU; the list gets the dtype of each call."""
    found = []

    def add_norm(x, update, weight, bias, epsilon, dtype):
        found.append(dtype)
        return add_norm_reference(x, update, weight, bias, epsilon, dtype)

    def normalize(self, x):
        return x

    module = ModuleType("vendor_of_norms")
    module.add_norm, module.normalize = add_norm, normalize
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = [Override("kernels.add_norm.add_norm", "vendor_of_norms:add_norm", "cpu")]
    monkeypatch.setattr(overrides, "_registered", rows)
    monkeypatch.setattr(overridable, "_loaded", {})
    return found


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 16).to(dtype).requires_grad_() for _ in range(2)]


def apart(x: torch.Tensor, update: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + update
    return total, norm(total)


@pytest.mark.parametrize(
    ("layer", "zero_centered", "dtype", "stream"),
    [
        (False, False, torch.float32, torch.float32),
        (True, False, torch.bfloat16, torch.bfloat16),
        (False, True, torch.bfloat16, torch.bfloat16),
        (True, True, torch.bfloat16, torch.float32),
        (False, False, torch.bfloat16, torch.float32),
    ],
)
def test_the_operator_gives_what_addition_and_norm_give(calls, layer, zero_centered, dtype, stream):
    norm = Norm(16, NormConfig(1e-5, layer, zero_centered)).to(dtype)
    nn.init.normal_(norm.weight)
    (x, _), (_, update) = inputs(stream), inputs(dtype)
    results = []
    for function in (add_and_normalize, apart):
        made = function(x, update, norm)
        leaves, upstream = [x, update, *norm.parameters()], [torch.ones_like(y) for y in made]
        results.append([*made, *torch.autograd.grad(made, leaves, upstream)])
    assert calls == [dtype]
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def test_what_has_to_see_the_norm_alone_still_does(calls, monkeypatch):
    x, update = (each.detach() for each in inputs())
    seen = []

    def see(*_):
        seen.append("hook")

    def save(function, *its):
        seen.append("policy")
        return function(*its)

    class Other(Norm):
        pass

    hooked, saved = Norm(16, NormConfig(1e-5)), Norm(16, NormConfig(1e-5))
    hooked.register_forward_pre_hook(see)
    saved.save_policy = save
    for norm in (hooked, saved, Other(16, NormConfig(1e-5)), nn.Identity()):
        found = add_and_normalize(x, update, norm)
        assert all(torch.equal(mine, other) for mine, other in zip(found, apart(x, update, norm), strict=True))
    assert seen == ["hook"] * 2 + ["policy"] * 2
    assert calls == []

    both = [*overrides._registered, Override("engine.model.layers.Norm.normalize", "vendor_of_norms:normalize", "cpu")]
    monkeypatch.setattr(overrides, "_registered", both)
    monkeypatch.setattr(overridable, "_loaded", {})
    assert torch.equal(add_and_normalize(x, update, Norm(16, NormConfig(1e-5)))[1], x + update)
    assert calls == []


def test_a_compiled_layer_calls_it_in_one_graph(calls):
    norm, (x, update) = Norm(16, NormConfig(1e-5)), inputs()
    expected = add_and_normalize(x, update, norm)
    found = torch.compile(add_and_normalize, backend="eager", fullgraph=True)(x, update, norm)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)  # compiled, RMSNorm is torch's
    assert len(calls) == 2
