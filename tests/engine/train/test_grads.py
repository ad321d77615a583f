"""Clipping by a norm that is already known: only larger gradients shrink, and a limit of 0 leaves all as they are."""

import pytest
import torch

from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.train.grads import clip_divisor, local_grad_norm_sq
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.precision import PrecisionSpec


def parameter(*gradient: float) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient, dtype=torch.float32)
    return made


@pytest.mark.parametrize(("limit", "expected"), [(0.0, [3, 4]), (6.0, [3, 4]), (5.0, [3, 4]), (1.0, [0.6, 0.8])])
def test_limits(limit, expected):
    """Moments tell what the update took for the gradient."""
    model = torch.nn.Module()
    model.taking, model.idle = parameter(3, 4), torch.nn.Parameter(torch.zeros(1))
    model.copy_embedding = lambda: None
    assert local_grad_norm_sq(model.parameters()).item() == 25
    optimizer = Optimizer(model, OptimizerSpec(beta1=0.5), PrecisionSpec(compute_dtype="fp32"))
    optimizer.step(1e-3, clip_divisor(5.0, limit))
    assert (2 * optimizer.states()["optimizer.exp_avg.taking"]).tolist() == pytest.approx(expected, rel=1e-6)
    model.taking.grad = torch.zeros(2)  # the next step's is not clipped because the last one's was
    optimizer.step(1e-3, clip_divisor(0.0, limit))
    assert (4 * optimizer.states()["optimizer.exp_avg.taking"]).tolist() == pytest.approx(expected, rel=1e-6)
    assert model.idle.grad is None


def test_a_norm_beyond_fp32_is_not_finite_but_large_ones_are():
    assert local_grad_norm_sq([parameter(3e19), parameter(4e19)]).sqrt().item() == pytest.approx(5e19)
    assert not local_grad_norm_sq([parameter(torch.inf)]).isfinite()


def test_the_norm_of_a_large_tensor_is_as_exact_as_that_of_its_parts():
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = values.double().square().sum().item()
    for parts in ([values], values.chunk(2)):
        parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for one, part in zip(parameters, parts, strict=True):
            one.grad = part.clone()
        assert local_grad_norm_sq(parameters).item() == pytest.approx(expected, rel=1e-9)
