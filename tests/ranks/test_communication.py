"""What each data-parallel strategy sends in a step of four microbatches: the table of switches, as counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import SEQUENCE, RandomSamples, small_spec
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.config.schema import RunSpec
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.parallel.gloo import ExchangeReduceScatter
from megalaunch.engine.train.assemble import sharded_model
from megalaunch.engine.train.batches import TrainBatches, batch_shape
from megalaunch.engine.train.passes import passes_of
from megalaunch.plan.topology import Topology

MICROBATCHES, UNITS = 4, 4  # three layers, and the rest


class Counted(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def _one_step(spec: RunSpec) -> dict[str, int]:
    mesh = make_mesh(Topology.of(spec), torch.device("cpu"), dist.get_rank())
    with Counted() as building:
        model = sharded_model(spec, mesh)
    assert not building.calls, "every rank draws its own part of the initial weights"
    batches = TrainBatches(RandomSamples(), batch_shape(8, mesh), mesh.device)
    batch = batches.of(1, last=1)
    batches.close()
    with Counted() as counted:
        passes_of(spec, mesh, model).train(batch, 8 * SEQUENCE)
    return dict(counted.calls)


@pytest.mark.parametrize(
    ("strategy", "gathers", "reductions"),
    [
        ("optim", UNITS, UNITS),
        ("optim_grads", UNITS * MICROBATCHES, UNITS * MICROBATCHES),
        # The layers are gathered for the backward pass again, the rest stays.
        ("optim_grads_params", (2 * UNITS - 1) * MICROBATCHES, UNITS * MICROBATCHES),
    ],
)
def test_sharded(strategy, gathers, reductions):
    spec = small_spec(parallel__dp=2, parallel__data_sharding=strategy, batch__micro_batch_size=1)
    assert run_ranks(2, _one_step, spec)[0] == {"_allgather_base_": gathers, "alltoall_base_": reductions}


def test_unsharded():
    spec = small_spec(parallel__dp=2, parallel__data_sharding="no_shard", batch__micro_batch_size=1)
    assert run_ranks(2, _one_step, spec)[0]["allreduce_"] == UNITS


def _own_reduce_scatter(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = torch.randn(4 * 6, generator=generator).to(dtype)
    mine, reference = torch.empty(6, dtype=dtype), torch.empty(6)
    ExchangeReduceScatter()(mine, parts, dist.group.WORLD, dist.ReduceOp.SUM)
    dist.reduce_scatter_tensor(reference, parts.float())
    return mine, reference.to(dtype)  # rounded once, after the sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reduce_scatter_of_processors_equals_that_of_gloo(dtype):
    for mine, reference in run_ranks(4, _own_reduce_scatter, dtype):
        torch.testing.assert_close(mine, reference)
