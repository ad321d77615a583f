"""Checkpointing for two backward passes: recomputed once, with the same numbers, and held no longer than the graph."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalaunch.engine.parallel.split_backward_checkpoint import checkpoint_split_backward


def _contexts() -> Any:
    return nullcontext(), nullcontext()


class Block(nn.Module):
    """A block that counts its passes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.passes = nn.Linear(8, 32), nn.Linear(32, 8), 0
        self.inner: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        inner = torch.nn.functional.dropout(self.up(x).tanh(), 0.5)
        self.inner.append(weakref.ref(inner.untyped_storage()))
        return x + self.down(inner)


def _checkpointed(block: Block, x: Tensor, *, preserve_rng_state: bool = True) -> Tensor:
    return checkpoint_split_backward(block, (x,), _contexts, preserve_rng_state=preserve_rng_state)


def _two_passes(block: Block, y: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of the input, then of each weight in a call of its own, as torch's pass for weights does."""
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return [*first, *(torch.autograd.grad(y.sum(), p, retain_graph=True)[0] for p in block.parameters())]


def test_two_passes_recompute_once_and_give_the_gradients_of_one():
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(7)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    torch.manual_seed(7)
    block.passes = 0
    y = _checkpointed(block, x)
    torch.manual_seed(99)  # what others draw meanwhile
    before = torch.get_rng_state()
    found = _two_passes(block, y, x)
    assert block.passes == 2
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_other_random_numbers_would_show():
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(7)
    [expected] = torch.autograd.grad(block(x).sum(), x)
    torch.manual_seed(7)
    y = _checkpointed(block, x, preserve_rng_state=False)
    [found] = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(found, expected)


def test_nothing_is_held_before_the_backward_nor_after_the_graph():
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    y = _checkpointed(block, x)
    [forward] = block.inner
    assert forward() is None
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    recomputed = block.inner[1]
    assert recomputed() is not None
    del y
    assert recomputed() is None


def test_a_whole_backward_pass_frees_what_it_has_read():
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    y = _checkpointed(block, x)
    y.sum().backward()
    assert block.passes == 2
    assert block.inner[1]() is None
    assert x.grad is not None


def test_nothing_after_the_last_saved_tensor_runs_again():
    ran = []

    def function(x: Tensor) -> Tensor:
        y = x * x
        ran.append(y)
        return y + 1

    x = torch.randn(4, requires_grad=True)
    y = checkpoint_split_backward(function, (x,), _contexts, preserve_rng_state=False)
    y.sum().backward()
    assert len(ran) == 1
    assert torch.equal(x.grad, 2 * x)


def test_a_function_that_does_less_when_it_is_recomputed_is_an_error():
    depth = [3]

    def function(x: Tensor) -> Tensor:
        for _ in range(depth[0]):
            x = x * x
        return x

    x = torch.randn(4, requires_grad=True)
    y = checkpoint_split_backward(function, (x,), _contexts, preserve_rng_state=False)
    depth[0] = 1
    with pytest.raises(
        RuntimeError, match="saved 2 tensors, its forward pass 6: the function must do the same in both"
    ):
        y.sum().backward()
