"""Beside which matmuls the exchanges of tensor parallelism run: the order in which a rank issues both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.collectives import (
    all_gather_async,
    all_reduce_async,
    all_to_all_async,
    reduce_scatter_async,
    ring_shift_async,
)
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.parallel.tensor_parallel import TensorParallel
from megalaunch.engine.param_layout import COLUMN_PARALLEL, ROW_PARALLEL

BATCH, SEQUENCE, HIDDEN, FEATURES = 2, 8, 6, 4
STARTS = {"all_gather_into_tensor_out": "gather", "all_reduce": "sum"}


class Issued(TorchDispatchMode):
    """Matmuls by the shape of their result, and exchanges where they start and where they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._under_way: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no address is given out twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name == "wait_tensor":
            self.events.append(f"wait for {self._under_way.pop(args[0].data_ptr())}")
        elif function.namespace == "_c10d_functional":
            self._kept.append(result)
            what = STARTS.get(name) or ("shift" if 0 in args[1] else "reduce")  # gloo reduces by exchanging parts
            self._under_way[result.data_ptr()] = what
            self.events.append(what)
        elif name in ("mm", "addmm"):
            self.events.append("x".join(map(str, result.shape)))
        return result


class Names(TorchDispatchMode):
    """The operators of exchanges that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "_c10d_functional":
            self.seen.add(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def _both_passes(sequence_parallel: bool, overlap: bool, region: str) -> tuple[list[str], list[str]]:
    """What this rank issues in a forward and in a backward pass of one end of a region."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    boundary = TensorParallel(axis, sequence_parallel, overlap)
    pass_through: Callable[[Tensor], tuple[Tensor, ...]]
    if region == "enter":
        ours = [Linear(HIDDEN, FEATURES, COLUMN_PARALLEL) for _ in range(2)]
        x = torch.ones(BATCH, boundary.local_seq_len(SEQUENCE), HIDDEN, requires_grad=True)
        pass_through = lambda x: boundary.column_parallel_linear(x, *ours)  # noqa: E731
    else:
        out = Linear(FEATURES, HIDDEN, ROW_PARALLEL)
        x = torch.ones(BATCH, SEQUENCE, FEATURES, requires_grad=True)
        pass_through = lambda x: (boundary.row_parallel_linear(x, out),)  # noqa: E731
    with Issued() as forward:
        results = pass_through(x)
    with Issued() as backward:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return forward.events, backward.events


def _shape(rows: int, columns: int) -> str:
    return f"{rows}x{columns}"


WHOLE = BATCH * SEQUENCE
DATA, WEIGHT = _shape(WHOLE, HIDDEN), _shape(FEATURES, HIDDEN)


@pytest.mark.parametrize("overlap", [False, True])
def test_backward_of_a_regions_start_hides_both_exchanges(overlap):
    _, backward = run_ranks(2, _both_passes, True, overlap, "enter")[0]
    # The gather beside the gradient of the input, its reduction beside those of the two weights.
    assert backward == ["gather", DATA, DATA, "reduce", "wait for gather", WEIGHT, WEIGHT, "wait for reduce"]


def test_backward_without_sequence_parallelism_hides_the_sum():
    _, backward = run_ranks(2, _both_passes, False, False, "enter")[0]
    assert backward == [DATA, DATA, "sum", WEIGHT, WEIGHT, "wait for sum"]


def test_no_exchange_on_processors_is_one_whose_name_breaks_the_heap():
    """Why: megalaunch/engine/collectives.py. A run of 100,000 exchanges would show it only now and then."""

    def issued() -> set[str]:
        axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
        x = torch.ones(4, 3)
        with Names() as names:
            for start in (all_gather_async, reduce_scatter_async):
                start(x, 0, axis).wait()
            for simple in (all_to_all_async, ring_shift_async, all_reduce_async):
                simple(x, axis).wait()
        return names.seen

    assert run_ranks(2, issued)[0] == {"all_gather_into_tensor_out", "all_to_all_single", "all_reduce", "wait_tensor"}


def test_forward_without_overlap_waits():
    forward, _ = run_ranks(2, _both_passes, True, False, "enter")[0]
    assert forward[:2] == ["gather", "wait for gather"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_enters_beside_its_matmuls(ranks):
    forward, _ = run_ranks(ranks, _both_passes, True, True, "enter")[0]
    products = [_shape(SEQUENCE // ranks, FEATURES)] * (2 * BATCH)  # of two weights
    assert forward == ["shift", *products, "wait for shift"] * (ranks - 1) + products


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_leaves_beside_its_matmuls(ranks):
    forward, backward = run_ranks(ranks, _both_passes, True, True, "leave")[0]
    products = [_shape(SEQUENCE // ranks, HIDDEN)] * BATCH
    assert forward == [*products, *(["shift", *products, "wait for shift"] * (ranks - 1))]
    dproducts = [_shape(SEQUENCE // ranks, FEATURES)] * BATCH
    turns = ["shift", *dproducts, "wait for shift"] * (ranks - 1)
    assert backward == [*turns, *dproducts, _shape(HIDDEN, FEATURES)]
