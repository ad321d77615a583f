"""The gradient norm is as exact for large tensors as for small ones."""

from __future__ import annotations

import pytest
import torch

from megalaunch.engine.train.clip import clip, local_squared_norm


def _with_gradient(values: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(values))
    parameter.grad = values.clone()
    return parameter


def test_the_norm_of_a_large_tensor():
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 1e-3
    whole, halves = [_with_gradient(values)], [_with_gradient(half) for half in values.chunk(2)]
    expected = values.double().square().sum().item()
    assert local_squared_norm(whole).item() == pytest.approx(expected, rel=1e-9)
    assert local_squared_norm(halves).item() == pytest.approx(expected, rel=1e-9)


def test_clipping_scales_only_what_is_too_large():
    parameter = _with_gradient(torch.tensor([3.0, 4.0]))
    clip([parameter], 5.0, 10.0)
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip([parameter], 5.0, 0.0)
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip([parameter], 5.0, 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-6)
