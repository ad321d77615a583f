"""Numbers that are not finite, unreadable batches and stop signals are noticed on every rank alike, in time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import RanksFailed, run_ranks
from oracle import RandomSamples, small_spec
from slow_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.data.errors import DataError
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.rank_sync import StepReduction, reduce_step_stats, sync_stop_signal
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


class FailingSamples(RandomSamples):
    """Sample 13 (step 2, rank 1) cannot be read."""

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 13:
            raise DataError("token 99 is no id of a vocabulary of 61", file="corpus.bin")
        return super().__getitem__(index)


def _make_step(spec: RunSpec, mesh: Mesh, model: ModelParts, samples: RandomSamples) -> TrainStep:
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    return TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)


def _two_steps(poison: str, samples: RandomSamples, **values: object) -> dict[str, object]:
    spec = small_spec(parallel__dp=2, batch__micro_batch_size=2, **values)
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    step = _make_step(spec, mesh, model, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    step.run(1, batches.get(1, 2))
    if poison == "loss" and mesh.rank == 1:
        passes = itertools.count()
        model.parts[-1].head.register_forward_hook(
            lambda module, x, logits: logits * (torch.nan if next(passes) == 1 else 1)
        )
    if poison == "router" and mesh.rank == 1:
        router = model.parts[0].layers["1"].mlp.router
        router.register_forward_pre_hook(lambda module, given: (given[0] * torch.inf, *given[1:]))
    if poison == "gradient" and mesh.rank == 1:
        model.parts[-1].norm.register_full_backward_hook(lambda *_: (_[1][0] * torch.inf,))
    weights = [to_local_no_grad(p).clone() for p in model.parameters()]
    try:
        step.run(2, batches.get(2, 2))
    except RunEnd as ending:
        same = all(torch.equal(a, to_local_no_grad(b)) for a, b in zip(weights, model.parameters(), strict=True))
        return {"code": int(ending.exit_code), "reason": ending.reason, "step": ending.step, "unchanged": same}
    finally:
        batches.close()
    return {"code": 0}


def test_a_loss_that_is_not_finite_names_rank_and_samples_before_the_update():
    answers = run_ranks(2, _two_steps, "loss", RandomSamples())
    assert answers[0] == answers[1]
    assert answers[0]["code"] == 7
    assert answers[0]["step"] == 1
    assert answers[0]["unchanged"]
    assert "loss of step 2 is not finite" in answers[0]["reason"]
    assert "on rank 1 (dp1)" in answers[0]["reason"]
    assert (
        "in the microbatch of: row 14; row 15; the update was not made" in answers[0]["reason"]
    )  # the second of two on that rank


def test_a_router_that_is_not_finite_is_named_with_its_rank():
    moe = {"num_experts": 4, "top_k": 2}
    answers = run_ranks(2, partial(_two_steps, model__moe=moe, model__num_layers=3), "router", RandomSamples())
    assert answers[0] == answers[1]
    assert (answers[0]["code"], answers[0]["unchanged"]) == (7, True)
    said = "; the first router whose logits are not finite is that of layer 1, on rank 1 (dp1); the update was not made"
    assert said in answers[0]["reason"]


def test_a_gradient_that_is_not_finite_stops_before_the_update():
    answers = run_ranks(2, _two_steps, "gradient", RandomSamples())
    assert answers[0] == answers[1]
    assert (answers[0]["code"], answers[0]["unchanged"]) == (7, True)
    assert "gradient norm of step 2 is inf" in answers[0]["reason"] or "is nan" in answers[0]["reason"]
    assert "in samples 8 to 15;" in answers[0]["reason"]


def test_an_unreadable_batch_ends_every_rank_with_its_reason():
    answers = run_ranks(2, _two_steps, "", FailingSamples())
    assert answers[0] == answers[1]
    assert answers[0]["code"] == 3
    assert answers[0]["unchanged"]
    assert "token 99" in answers[0]["reason"]


@pytest.mark.parametrize(("loss", "norm"), [(math.inf, 1.0), (1.0, math.inf), (math.nan, math.nan)])
def test_either_number_alone_stops_the_update(loss, norm):
    """An infinite loss can have a finite gradient: a label whose logit is -inf."""
    assert not StepReduction(loss, norm, None).finite
    assert StepReduction(1.0, 1.0, None).finite


def _votes(first: signal.Signals | None, second: signal.Signals | None) -> list[object]:
    received = (first, second)[dist.get_rank()]
    verdict = reduce_step_stats(torch.tensor(1.5), torch.tensor(8.0, dtype=torch.float64), received)
    between_steps = sync_stop_signal(received, None, 1, torch.device("cpu"))
    return [verdict.stop, between_steps, verdict.loss, verdict.grad_norm]


@pytest.mark.parametrize(
    ("first", "second", "elected"),
    [
        (None, None, None),
        (None, signal.SIGTERM, signal.SIGTERM),
        (None, signal.SIGALRM, signal.SIGALRM),
        (signal.SIGALRM, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, None, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT, signal.SIGINT),
    ],
)
def test_one_ranks_signal_stops_all(first, second, elected):
    assert run_ranks(2, _votes, first, second) == [[elected, elected, 3.0, 4.0]] * 2


def _step_that_loses_a_rank(exchange: int, heard: Path) -> None:
    """Rank 1 is killed at this exchange of step 2; rank 0 writes what became of its step."""
    spec = small_spec(parallel__tp=2, parallel__sequence_parallel=True)
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model, samples = build_sharded_model(spec, mesh), RandomSamples()
    step = _make_step(spec, mesh, model, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    step.run(1, batches.get(1, 2))
    before = itertools.count()

    class Dies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d" in function.namespace and next(before) == exchange:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **(kwargs or {}))

    with Dies() if mesh.rank == 1 else contextlib.nullcontext():
        try:
            step.run(2, batches.get(2, 2))
        except Exception as error:
            heard.write_text(f"{type(error).__name__}: {error}")
            raise


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("exchange", slow_but([0, 5, 30], 5))
def test_a_lost_rank_is_an_error_of_the_others_and_no_end_on_purpose(tmp_path, exchange):
    """The result of an exchange that failed is never read: it would be memory that holds anything, NaN too."""
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL"):
        run_ranks(2, _step_that_loses_a_rank, exchange, tmp_path / "heard")
    assert (tmp_path / "heard").read_text().startswith("RuntimeError: ")
