"""Beside which blocks of attention a ring's shifts run: the order in which a rank issues both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from slow_cases import slow_but
from torch import Tensor

from megalaunch.engine.collectives import AsyncCollective, ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.parallel import ring_attention
from megalaunch.engine.parallel.context_parallel import ContextParallel, cp_positions

BATCH, HEADS, SEQUENCE, DIM = 1, 2, 16, 4


@contextmanager
def _recorded() -> Iterator[list[str]]:
    """Record the blocks of both passes, and the shifts where they start and where they are waited for."""
    events: list[str] = []

    def shift(x: Tensor, axis: Axis, **direction: Any) -> AsyncCollective:
        what = "sums" if x.dtype == torch.float32 else "keys"  # keys and values are in bf16
        started = ring_shift_async(x, axis, **direction)
        events.append(f"send {what}")

        def finish(result: Tensor) -> Tensor:
            events.append(f"wait for {what}")
            return started.finish(result)

        return AsyncCollective(started.in_flight, finish)

    def blocks(original: Any) -> Any:
        def compute(*arguments: Any) -> None:
            events.append("block")
            original(*arguments)

        return compute

    with mock.patch.multiple(
        ring_attention,
        ring_shift_async=shift,
        add_blocks=blocks(ring_attention.add_blocks),
        add_gradients=blocks(ring_attention.add_gradients),
    ):
        yield events


def _both_passes() -> tuple[list[str], list[str]]:
    """What this rank issues in a forward and in a backward pass of attention."""
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    positions = cp_positions(SEQUENCE, axis)
    attend = ContextParallel(axis, ("p2p",)).make_attention(len(positions), None, [None], positions.device)[0]
    q, k, v = (torch.ones(BATCH, HEADS, len(positions), DIM, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with _recorded() as forward:
        out = attend(q, k, v)
    with _recorded() as backward:
        out.sum().backward()
    return forward, backward


@pytest.mark.parametrize("ranks", slow_but([2, 4], 2))
def test_keys_are_sent_beside_the_block_that_reads_them(ranks):
    for forward, _ in run_ranks(ranks, _both_passes):
        assert forward == ["send keys", "block", "wait for keys"] * (ranks - 1) + ["block"]


@pytest.mark.parametrize("ranks", slow_but([2, 4], 2))
def test_gradients_are_sent_beside_the_next_block(ranks):
    """No shift is left over after the last block: that one is of the rank's own keys."""
    first = ["send keys", "block", "send sums", "wait for keys"]
    later = ["send keys", "block", "wait for sums", "send sums", "wait for keys"]
    for _, backward in run_ranks(ranks, _both_passes):
        assert backward == first + later * (ranks - 2) + ["block", "wait for sums"]
