"""Pipeline stages under other versions of torch: which class, what they hand on, and the pass for weights.

`scripts/test --matrix` runs the pipelines themselves under those versions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input

from megalaunch.engine.parallel.pipeline_stage import (
    KnownShapesStage,
    LazyRecvStage,
    SplitBackwardStage,
    _add_weight_grads,
    stage_class,
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.11.0+cu130", KnownShapesStage), ("2.12.1", SplitBackwardStage), ("2.13.0+cpu", LazyRecvStage)],
)
def test_each_version_has_its_stage(monkeypatch, version, expected):
    monkeypatch.delattr("torch.distributed.pipelining.stage._RecvInfo.allocate_buffer", raising=False)
    assert stage_class(version) is expected


class Halves(torch.autograd.Function):
    """x W as two outputs: one node with two gradients, and a node that does not keep its graph before torch 2.13."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        left, right = (x @ weight).chunk(2, dim=1)
        return left.clone(), right.clone()

    @staticmethod
    def backward(ctx, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = torch.cat([left, right], dim=1)
        return grad @ weight.t(), x.t() @ grad


def _used_once(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).relu()


def _used_twice(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() @ weight


def _two_outputs(x: Tensor, weight: Tensor) -> Tensor:
    left, right = Halves.apply(x, weight)
    return torch.cat([left.sin(), 3 * right], dim=1) + x


@pytest.mark.parametrize("function", [_used_once, _used_twice, _two_outputs])
def test_both_passes_add_up_to_one_backward(function):
    torch.manual_seed(1)
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    before, grad = torch.randn(4, 4), torch.randn(4, 4)
    of_x, of_weight = torch.autograd.grad(function(x, weight), (x, weight), grad)
    weight.grad = before.clone()  # of the microbatch before
    output = function(x, weight)
    graph = get_gradient_edge(output)
    found, groups = stage_backward_input([output], [grad], [x], iter([weight]))
    for group in groups:
        _add_weight_grads(group)
    assert graph.node is not None
    torch.testing.assert_close(found[0], of_x)
    torch.testing.assert_close(weight.grad, before + of_weight)


def test_receives_stay_in_the_group_of_their_direction(monkeypatch):
    """torch 2.14 gives the group of a direction to the method that earlier versions call with the receives alone."""
    given = []
    monkeypatch.setattr(PipelineStage, "_get_recv_ops", lambda _, infos, *group: given.append((infos, *group)))
    stage = object.__new__(LazyRecvStage)
    stage._get_recv_ops((), "downstream")
    stage._get_recv_ops(())
    assert given == [((), "downstream"), ((),)]
