"""A zero-bubble schedule's two backward passes, for inputs and for weights, do together the work of one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import SEQUENCE, RandomSamples, hold_to_one_process, small_spec
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.collectives import all_gather_async
from megalaunch.engine.mesh import Axis, make_mesh
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.parallel.tp_overlap import MatmulReduceScatterRing
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

MATMULS = ("mm", "addmm", "bmm")


class Calls(TorchDispatchMode):
    """Counts matmuls, and exchanges between tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = function._schema.name.partition("::")[2], function(*args, **(kwargs or {}))
        if name in MATMULS and min(result.shape) > 1:  # sums of columns may be written as products too
            self.seen["matmul"] += 1
        elif function.namespace == "_c10d_functional" and name != "wait_tensor":
            self.seen["exchange"] += 1
        return result


def _work(spec: RunSpec) -> Counter[str]:
    """Of the second step: in the first, a pipeline finds out its shapes."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    forward_backward = make_forward_backward(spec, mesh, build_sharded_model(spec, mesh))
    batches = PrefetchingDataLoader(RandomSamples(), make_batch_sampler(spec, mesh), mesh.device)
    for step in (1, 2):
        calls = Calls()
        with calls:
            forward_backward.train(batches.get(step, last=2), 8 * SEQUENCE)
    batches.close()
    return calls.seen


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param({"parallel__tp": 2}, marks=(pytest.mark.slow, pytest.mark.release)),
        pytest.param({"parallel__tp": 2, "parallel__sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param(
            {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
            marks=pytest.mark.slow,
        ),
        {"precision__compute_dtype": "bf16"},
        {"recompute__granularity": "full"},
        {"recompute__granularity": "selective", "recompute__modules": ("mlp", "norm")},
    ],
    ids=["tp2", "tp2 sp", "tp2 sp overlapped", "bf16", "recomputed", "partly recomputed"],
)
def test_both_passes_together_do_the_work_of_one(tensor, monkeypatch):
    monkeypatch.setattr("megalaunch.kernels.matmul._unit", lambda: None)  # products in bf16 are our own function
    values = {"parallel__pp": 2, "model__num_layers": 2, "model__vocab_size": 62, **tensor}
    at_once, apart = (
        run_ranks(2 * values.get("parallel__tp", 1), _work, small_spec(parallel__schedule=schedule, **values))
        for schedule in ("1f1b", "zero_bubble")
    )
    for one, two in zip(at_once, apart, strict=True):
        assert one["matmul"] > 0
        assert two["matmul"] == one["matmul"]
        assert two.get("exchange", 0) <= one.get("exchange", 0)


def _weight_pass_after(same: bool) -> tuple[int, float, bool, bool]:
    """Exchanges and error of a ring's weight pass after its input pass, and whether anything was kept meanwhile, after.

    `same`: both passes are given the same gradient.
    """
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randn(2, 8, 4, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, requires_grad=True)
    total = MatmulReduceScatterRing.apply(x.view_as(x), axis, weight.view_as(weight))
    first, other = (torch.randn(total.shape, generator=generator) for _ in range(2))
    torch.autograd.grad(total, x, first, retain_graph=True)
    kept, second = total.grad_fn.saved_dy is not None, first if same else other
    with Calls() as calls:
        (found,) = torch.autograd.grad(total, weight, second, retain_graph=True)
    whole = torch.cat(list(all_gather_async(second, 1, axis).wait()))
    error = (found - whole.T @ x.detach().flatten(0, 1)).abs().max().item()
    return calls.seen["exchange"], error, kept, total.grad_fn.saved_dy is not None


@pytest.mark.parametrize(("same", "exchanges"), [(True, 0), (False, 1)])
def test_a_weight_pass_uses_what_the_input_pass_gathered_of_the_same_gradient(same, exchanges):
    for count, error, kept, still_kept in run_ranks(2, _weight_pass_after, same):
        assert (count, kept, still_kept) == (exchanges, True, False)
        assert error < 1e-5


@pytest.mark.slow
def test_overlapped_rings_under_zero_bubble_equal_one_process():
    hold_to_one_process(
        small_spec(
            parallel__schedule="zero_bubble",
            parallel__tp=2,
            parallel__pp=2,
            model__num_layers=2,
            parallel__sequence_parallel=True,
            parallel__tp_comm_overlap=True,
        )
    )
