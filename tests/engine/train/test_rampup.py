"""A batch size that grows during training: the samples, losses and updates of one process, under every layout."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import metrics, run_loop, ten_steps
from oracle import STEPS, RandomSamples, hold_to_one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.batch import samples_of_step
from megalaunch.plan.topology import Topology
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

RAMP = "4 4 8"  # two steps of 4 samples, then 8
LAYOUTS = {
    "tp2": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "dp2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "pp2 1f1b": {
        "parallel__pp": 2,
        "parallel__schedule": "1f1b",
        "batch__micro_batch_size": 1,
        "model__num_layers": 2,
    },
    "pp2 interleaved": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "interleaved",
        "batch__micro_batch_size": 1,
        "model__num_layers": 4,
    },
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "pp2 1f1b", every=["tp2", "dp2"]))
def test_a_layout_trains_as_one_process(name):
    hold_to_one_process(small_spec(batch__rampup_batch_size=RAMP, **LAYOUTS[name]))


MOE = {
    "model__num_layers": 2,
    "model__moe": {"num_experts": 4, "top_k": 2, "balance_loss_coeff": 0.5, "z_loss_coeff": 0.1},
}


def _first_steps(spec: RunSpec) -> list[tuple[float, float, float, float]]:
    """Loss, gradient norm and the router's losses of each step."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model, samples = build_sharded_model(spec, mesh), RandomSamples()
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    results = [step.run(number, batches.get(number, STEPS)) for number in range(1, STEPS + 1)]
    batches.close()
    return [(r.loss, r.grad_norm, r.experts.balance_loss, r.experts.z_loss) for r in results]


def test_router_losses_are_the_mean_over_the_microbatches_of_the_step():
    """The first step of a ramp is that of a run with its batch size, whose routers average over fewer microbatches."""
    ramped = small_spec(batch__rampup_batch_size=RAMP, batch__micro_batch_size=2, **MOE)
    small = small_spec(batch__global_batch_size=4, batch__micro_batch_size=2, **MOE)
    alone = run_ranks(1, _first_steps, ramped)[0]
    assert alone[0] == pytest.approx(run_ranks(1, _first_steps, small)[0][0], rel=1e-6)
    pipeline = with_values(ramped, {"parallel.pp": 2, "parallel.schedule": "1f1b", "cluster.devices_per_node": 2})
    for found in run_ranks(2, _first_steps, pipeline):
        assert found == [pytest.approx(step, rel=1e-5) for step in alone]


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    whole = ten_steps(tmp_path_factory.mktemp("tokens"))
    ramp = {"batch.rampup_batch_size": "4 2 16", "batch.micro_batch_size": 1}  # 4 4 | 6 6 | 8 8 8 ...
    return with_values(whole, ramp)


@pytest.mark.slow
def test_a_run_stopped_in_the_ramp_goes_on_exactly(spec, tmp_path):
    assert [len(samples_of_step(spec, step)) for step in range(1, 6)] == [4, 4, 6, 6, 8]
    assert run_loop(spec, tmp_path / "whole").reason == "finished all 10 steps"
    run_loop(with_values(spec, {"train.exit_at_step": 3}), tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    run_loop(spec, tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    first, second = (read_tensors(RunDirectory(tmp_path / root).checkpoint(10)) for root in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    rates = {line["step"]: line["learning_rate"] for line in metrics(tmp_path / "whole") if "loss" in line}
    assert rates[1] == pytest.approx(1e-3 * (4 / 8) / 2)  # half a step of two of warmup
    assert rates[4] > rates[5]
    alone = with_values(spec, {"parallel.dp": 1, "cluster.devices_per_node": 1})
    run_loop(alone, tmp_path / "other")
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "other"), strict=True):
        assert one == pytest.approx(other, rel=1e-5), json.dumps(one)
