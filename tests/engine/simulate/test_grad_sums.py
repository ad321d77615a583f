"""Sums of gradients in a simulation: in place exactly where autograd's are in a real backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megalaunch.engine.simulate.grad_sums import GradSums
from megalaunch.engine.torch_private import TorchDispatchMode, make_fake_tensor_mode

HELD: list[Tensor] = []


class New(torch.autograd.Function):
    """Its gradient is a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.clone()


class Held(New):
    """Its gradient is held by something else, too."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        HELD.append(dy.clone())
        return HELD[-1]


class Summed(New):
    """It adds tensors itself."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy + dy.clone()


def _two_readers(first: Any, second: Any) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        x = torch.ones(8, 16, requires_grad=True) * 2
        return (first.apply(x) * second.apply(x)).sum()

    return loss


def _residual() -> Tensor:
    x = torch.ones(8, 16, requires_grad=True) * 2
    return (x + New.apply(x)).sum()


def _transposed() -> Tensor:
    table = torch.ones(8, 16, requires_grad=True) * 2
    return ((torch.ones(4, 16) @ table.T) * New.apply(table).sum()).sum()


LOSSES = {
    "two readers": _two_readers(New, New),
    "three readers": lambda: _two_readers(New, New)() + _residual(),
    "held": _two_readers(New, Held),
    "a residual stream": _residual,
    "a transposed table": _transposed,
    "a function that adds": _two_readers(Summed, New),
}


class _InPlace(TorchDispatchMode):
    def __init__(self, sums: GradSums) -> None:
        super().__init__()
        self.sums, self.found = sums, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = self.sums.is_in_place(function, args)
        if in_place or function is torch.ops.aten.add.Tensor:
            self.found.append("aten::add_" if in_place else "aten::add")
        return args[0].add_(args[1]) if in_place else function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
def test_sums_are_in_place_where_autograd_s_are(name):
    HELD.clear()
    loss = LOSSES[name]()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss.backward()
    HELD.clear()
    with make_fake_tensor_mode():
        loss, mode = LOSSES[name](), _InPlace(GradSums())
        with mode:
            loss.backward()
    expected = [event.name for event in recorded.events() if event.name in ("aten::add", "aten::add_")]
    assert mode.found == expected
    assert expected
