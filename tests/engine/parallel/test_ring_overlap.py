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
from torch.nn.attention import flex_attention as torch_flex_attention

from megalaunch.engine.collectives import AsyncCollective, ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.partial_attention import BlockwisePart, FlexPart
from megalaunch.engine.parallel import ring_attention
from megalaunch.engine.parallel.context_parallel import ContextParallel, cp_positions
from megalaunch.plan.attention_choice import TakenBackend, TakenBackends

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

    def block(original: Any) -> Any:
        def compute(*arguments: Any) -> None:
            events.append("block")
            original(*arguments)

        return compute

    def blocks(part: type) -> Any:
        return mock.patch.multiple(part, add_output=block(part.add_output), add_gradients=block(part.add_gradients))

    with (
        mock.patch.object(ring_attention, "ring_shift_async", shift),
        mock.patch.object(torch_flex_attention, "_validate_device"),  # it refuses gradients on a CPU
        blocks(BlockwisePart),
        blocks(FlexPart),
    ):
        yield events


def _both_passes(backend: TakenBackend) -> tuple[list[str], list[str]]:
    """What this rank issues in a forward and in a backward pass of attention."""
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    positions = cp_positions(SEQUENCE, axis)
    context = ContextParallel(axis, ("p2p",), backends=TakenBackends(backend))
    attend = context.make_attention(len(positions), None, [None], positions.device)[0]
    q, k, v = (torch.ones(BATCH, HEADS, len(positions), DIM, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with _recorded() as forward:
        out = attend(q, k, v)
    with _recorded() as backward:
        out.sum().backward()
    return forward, backward


RINGS = [(2, "auto"), (4, "auto"), (2, "flex")]


@pytest.mark.parametrize(("ranks", "backend"), slow_but(RINGS, (2, "auto"), (2, "flex")))
def test_keys_are_sent_beside_the_block_that_reads_them(ranks, backend):
    for forward, _ in run_ranks(ranks, _both_passes, backend):
        assert forward == ["send keys", "block", "wait for keys"] * (ranks - 1) + ["block"]


@pytest.mark.parametrize(("ranks", "backend"), slow_but(RINGS, (2, "auto"), (2, "flex")))
def test_gradients_are_sent_beside_the_next_block(ranks, backend):
    """No shift is left over after the last block: that one is of the rank's own keys."""
    first = ["send keys", "block", "send sums", "wait for keys"]
    later = ["send keys", "block", "wait for sums", "send sums", "wait for keys"]
    for _, backward in run_ranks(ranks, _both_passes, backend):
        assert backward == first + later * (ranks - 2) + ["block", "wait for sums"]
