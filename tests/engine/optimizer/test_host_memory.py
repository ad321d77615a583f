"""Optimizer states in host memory: the same bits as on the device, in checkpoints of the same form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import STEPS, RandomSamples, small_spec
from slow_cases import slow_but

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.optimizer.host_memory import choose_offloaded
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.checkpointer import state_tensors
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, with_values

FRACTION = "optimizer.optimizer_offload_fraction"
LAYOUTS = {
    "zero0": {"parallel__dp": 2, "parallel__data_sharding": "no_shard"},
    "zero2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"},
    "zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "zero3, weights in bf16": {
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
        "precision__compute_dtype": "bf16",
        "precision__main_params_dtype": "bf16",
    },
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, "model__num_layers": 1, "model__moe": {"num_experts": 4, "top_k": 2}},
}


def _trained(spec: RunSpec, fractions: tuple[float, ...]) -> list[dict[str, torch.Tensor]]:
    """Weights and moments after three steps, with each fraction; embedding and head have a rate of their own."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    every = []
    for fraction in fractions:
        asked = with_values(spec, {FRACTION: fraction, "optimizer.embedding_lr": 2e-3})
        model, samples = build_sharded_model(asked, mesh), RandomSamples()
        optimizer = Optimizer(model, asked.optimizer, asked.precision)
        step = TrainStep(asked, mesh, model, make_forward_backward(asked, mesh, model), optimizer, samples)
        batches = PrefetchingDataLoader(samples, make_batch_sampler(asked, mesh), mesh.device)
        for number in range(1, STEPS + 1):
            step.run(number, batches.get(number, STEPS))
        batches.close()
        tensors = state_tensors(model, optimizer)
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
        every.append({name: tensor.float() for name, tensor in whole.items()})
    return every


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pp2", slow=["zero3"], one_in=2))
def test_states_in_host_memory_change_no_bit(layout):
    """Names, shapes and values of a checkpoint do not depend on the fraction."""
    spec = small_spec(batch__micro_batch_size=1, **LAYOUTS[layout])
    for none, *others in run_ranks(spec.cluster.devices_per_node, _trained, spec, (0.0, 0.5, 1.0)):
        for other in others:
            assert other.keys() == none.keys()
            assert all(np.array_equal(other[name], value) for name, value in none.items())


def test_the_largest_parameters_that_fit_are_offloaded():
    sizes = {"small": 10, "large": 60, "middle": 30}
    parameters = {name: torch.empty(size) for name, size in sizes.items()}
    chosen = {fraction: set(choose_offloaded(parameters, fraction)) for fraction in (0.0, 0.4, 0.6, 0.7, 1.0)}
    assert chosen == {
        0.0: set(), 0.4: {"middle", "small"}, 0.6: {"large"}, 0.7: {"large", "small"}, 1.0: set(sizes)
    }  # fmt: skip
