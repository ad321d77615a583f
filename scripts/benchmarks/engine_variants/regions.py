"""One tensor-parallel region alone, both passes: its exchanges waited for, beside the matmuls, or in rings."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from engine_variants.shape import Work
from megalaunch.engine.collectives import AsyncCollective, all_gather_async, reduce_scatter_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.parallel import tensor_parallel
from megalaunch.engine.parallel.tensor_parallel import TensorParallel
from megalaunch.engine.param_layout import COLUMN_PARALLEL, ROW_PARALLEL

WIDTH = 1024  # of the region's input, and of what it multiplies to on all ranks together


def region(work: Work, *, rings: bool = False, waits: bool = False) -> Callable[[], float]:
    """Forward and backward of one region; returns the sum of its input's gradient."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    boundary = TensorParallel(axis, sequence_parallel=True, overlap=rings)
    torch.manual_seed(axis.rank)
    first, second = (Linear(WIDTH, WIDTH // axis.size, COLUMN_PARALLEL) for _ in range(2))
    last = Linear(WIDTH // axis.size, WIDTH, ROW_PARALLEL)
    for projection in (first, second, last):
        torch.nn.init.normal_(projection.weight, std=0.02)
    x = torch.randn(work.samples, work.tokens // axis.size, WIDTH, requires_grad=True)

    def one() -> float:
        left, right = boundary.column_parallel_linear(x, first, second)
        out = boundary.row_parallel_linear(left + right, last)
        (gradient,) = torch.autograd.grad(out, [x], out.detach(), retain_graph=False)
        return gradient.sum().item()

    def waiting() -> float:
        with (
            mock.patch.object(tensor_parallel, "all_gather_async", _at_once(all_gather_async)),
            mock.patch.object(tensor_parallel, "reduce_scatter_async", _at_once(reduce_scatter_async)),
        ):
            return one()

    return waiting if waits else one


def _at_once(start: Callable[..., AsyncCollective]) -> Callable[..., AsyncCollective]:
    """The exchange, over before anything else begins."""

    def exchanged(*args: object) -> AsyncCollective:
        result = start(*args).wait()
        return mock.Mock(spec=AsyncCollective, wait=lambda: result)

    return exchanged
