"""Clipping by a norm that is already known: only larger gradients shrink, and a limit of 0 leaves all as they are."""

import pytest
import torch

from megalaunch.engine.train.clip import clip, local_squared_norm


def parameter(*gradient: float) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient, dtype=torch.float32)
    return made


@pytest.mark.parametrize(("limit", "expected"), [(0.0, [3, 4]), (6.0, [3, 4]), (5.0, [3, 4]), (1.0, [0.6, 0.8])])
def test_limits(limit, expected):
    parameters = [parameter(3, 4), torch.nn.Parameter(torch.zeros(1))]  # the last one took no part in the step
    assert local_squared_norm(parameters).item() == 25
    clip(parameters, 5.0, limit)
    assert parameters[0].grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert parameters[1].grad is None


def test_a_norm_beyond_fp32_is_not_finite_but_large_ones_are():
    assert local_squared_norm([parameter(3e19), parameter(4e19)]).sqrt().item() == pytest.approx(5e19)
    assert not local_squared_norm([parameter(torch.inf)]).isfinite()


def test_the_norm_of_a_large_tensor_is_as_exact_as_that_of_its_parts():
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = values.double().square().sum().item()
    for parts in ([values], values.chunk(2)):
        parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for one, part in zip(parameters, parts, strict=True):
            one.grad = part.clone()
        assert local_squared_norm(parameters).item() == pytest.approx(expected, rel=1e-9)
