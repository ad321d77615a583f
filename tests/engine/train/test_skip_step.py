"""A gradient norm above optimizer.skip_step_grad_norm skips the update on all ranks; data and steps go on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from float8_runs import float8_spec
from forked_ranks import run_ranks
from oracle import STEPS, WARMUP, RandomSamples, small_spec
from resumed_run import Run

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, with_values


def _steps(spec: RunSpec) -> list[tuple[float, bool, bool, float, int]]:
    """Of each step: norm, whether it was skipped, whether weights stayed, learning rate, steps skipped so far."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model, samples = build_sharded_model(spec, mesh), RandomSamples()
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    told = []
    for number in range(1, STEPS + 1):
        before = [to_local_no_grad(p).clone() for p in model.parameters()]
        result = step.run(number, batches.get(number, STEPS))
        same = all(torch.equal(a, to_local_no_grad(b)) for a, b in zip(before, model.parameters(), strict=True))
        told.append((result.grad_norm, result.skipped, same, result.learning_rate, result.updates.skipped_steps))
        assert all(parameter.grad is None for parameter in model.parameters())
    batches.close()
    return told


def test_steps_with_a_large_norm_are_skipped():
    """The limit is the middle one of three norms, so that some steps are skipped and some are not."""
    spec = small_spec(parallel__dp=2, parallel__data_sharding="optim_grads_params", batch__micro_batch_size=1)
    limit = sorted(norm for norm, *_ in run_ranks(2, _steps, spec)[0])[1]
    every = run_ranks(2, _steps, with_values(spec, {"optimizer.skip_step_grad_norm": limit}))
    assert every[0] == every[1]
    updates = 0
    for number, (norm, skipped, same, rate, skipped_steps) in enumerate(every[0], start=1):
        assert skipped is same is (norm > limit)
        assert rate == spec.optimizer.lr * min(1, (updates + 1) / WARMUP)
        updates += not skipped
        assert skipped_steps == number - updates
    assert 0 < updates < STEPS


def _histories(spec: RunSpec) -> list[tuple[bool, bool]]:
    """Of each step: whether it was skipped, and whether amax histories and scales stayed."""
    run, told = Run(spec), []
    (histories,) = (part.amax_histories for part in run.model.parts)

    def state() -> tuple[torch.Tensor, ...]:
        return *(one.clone() for one in histories.states().values()), histories.scale_n3.clone()

    for number in range(1, STEPS + 1):
        before, had_scales = state(), histories.has_scales
        result = run.step.run(number, run.batches.get(number, STEPS))
        same = all(map(torch.equal, before, state())) and histories.has_scales == had_scales
        told.append((result.skipped, same))
    return told


def test_a_skipped_step_enters_no_amax_history():
    spec = float8_spec({"dp": 2}, "delayed")
    limit = sorted(norm for norm, *_ in run_ranks(2, _steps, spec)[0])[1]
    told = run_ranks(2, _histories, with_values(spec, {"optimizer.skip_step_grad_norm": limit}))
    assert told[0] == told[1]
    assert {skipped for skipped, _ in told[0]} == {False, True}
    assert all(skipped == same for skipped, same in told[0])
