"""fp16 with a loss scale: the numbers of fp32 to its rounding under every layout, and skipped steps on all ranks."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import events, metrics, run_loop, ten_steps
from oracle import STEPS, Numbers, RandomSamples, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import StepResult, TrainStep
from megalaunch.plan.topology import Topology
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

LAYOUTS = {
    "one process": {},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "pp3": {"parallel__pp": 3, "parallel__schedule": "1f1b"},
    "pp3 zero bubble": {"parallel__pp": 3, "parallel__schedule": "zero_bubble"},
    "cp2": {"parallel__cp": 2},
    "zero0": {"parallel__dp": 2, "parallel__data_sharding": "no_shard"},
    "zero2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"},
    "zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "loss chunks": {"train__loss_chunks": 4},
}
MOE = {"num_experts": 4, "top_k": 2, "balance_loss_coeff": 0.5, "z_loss_coeff": 0.1}
ROUNDING = 4e-3  # of gradients, as a share of each one's norm: fp16 has 11 bits


def _gradients(spec: RunSpec) -> dict[str, torch.Tensor]:
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    size, scale = spec.batch.global_batch_size, 1.0
    batches = PrefetchingDataLoader(
        RandomSamples(), make_batch_sampler(spec, mesh), mesh.device, mtp_depths=spec.model.mtp.num_layers
    )
    batch = batches.get(1, last=1)
    batches.close()
    passes = make_forward_backward(spec, mesh, model)
    if spec.precision.compute_dtype == "fp16":
        scale = spec.precision.loss_scale.initial
        passes.set_loss_scale(scale)
    counts = [size * mesh.topology.cp * 16] * (1 + spec.model.mtp.num_layers)
    losses = passes.train(batch, counts[0], counts[1:])
    return {"loss": losses.sum(0)} | {
        name: to_local_no_grad(p.grad) / scale for name, p in model.named_parameters() if p.grad is not None
    }


def _errors(**values: object) -> dict[str, float]:
    """The error of each gradient of one process in fp16, as a share of its norm."""
    specs = [small_spec(precision__compute_dtype=dtype, **values) for dtype in ("fp32", "fp16")]
    exact, found = (run_ranks(1, _gradients, spec)[0] for spec in specs)
    return {name: float(np.linalg.norm(found[name] - g) / np.linalg.norm(g)) for name, g in exact.items()}


@pytest.mark.parametrize("auxiliary", ["experts", "mtp"])
def test_auxiliary_losses_are_scaled_too(auxiliary):
    """Unscaled, the gradients of the losses of routers and MTP depths would be 65536 times too small."""
    values = {"model__moe": MOE} if auxiliary == "experts" else {"model__mtp": {"num_layers": 1}}
    errors = _errors(**values)
    assert len(errors) > 20
    assert max(errors.values()) < ROUNDING, max(errors, key=errors.__getitem__)


def test_small_gradients_need_the_scale():
    """Without it (a scale of 1) fp16 loses what is below 6e-8."""
    batch = {"batch__global_batch_size": 64, "batch__micro_batch_size": 64}
    unscaled, scaled = _errors(precision__loss_scale={"initial": 1.0}, **batch), _errors(**batch)
    assert max(scaled.values()) < ROUNDING < max(unscaled.values())


@pytest.mark.parametrize(
    "layout", slow_but(LAYOUTS, "one process", "zero3", every=["tp2 sp", "cp2", "pp3 zero bubble"])
)
def test_every_layout_trains_in_fp16_as_in_bf16(layout):
    fp16, bf16 = (_numbers(compute, **LAYOUTS[layout]) for compute in ("fp16", "bf16"))
    np.testing.assert_allclose(fp16.losses, bf16.losses, rtol=1e-3)
    np.testing.assert_allclose(fp16.norms, bf16.norms, rtol=2e-3)
    np.testing.assert_allclose(fp16.validation, bf16.validation, rtol=1e-3)


LION = {"optimizer__name": "lion", "optimizer__lr": 1e-3}
MUON = {"optimizer__name": "muon", "optimizer__lr": 0.02}
SGD = {"optimizer__name": "sgd", "optimizer__lr": 0.3, "optimizer__momentum": 0.9}
OPTIMIZERS = {"lion": LION, "muon": MUON, "sgd": SGD}
DOUBLING = {"precision__loss_scale": {"window": 1}}
"""The scale doubles in each step: one that stayed in the momentum would weigh the steps otherwise."""
LINEAR = {
    "adamw": {"optimizer__lr": 0.3, "optimizer__epsilon": 1.0},  # else AdamW would hide a factor of the gradients
    "sgd": SGD,
    "nesterov": SGD | {"optimizer__nesterov": True},
}
"""Optimizers whose updates are as large as the gradients."""


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    slow_but(
        [("adamw", "one process"), *product(["sgd", "nesterov"], ["one process", "tp2 sp", "pp3", "cp2", "zero3"])],
        ("adamw", "one process"),
        ("sgd", "one process"),
        every=[("sgd", "pp3"), ("nesterov", "zero3")],
    ),
)
def test_the_update_divides_by_the_scale(optimizer, layout):
    of_optimizer = LINEAR[optimizer]
    begun, exact = (_numbers("fp32", **of_optimizer | rate).parameters for rate in ({"optimizer__lr": 0.0}, {}))
    found = _numbers("fp16", **of_optimizer | LAYOUTS[layout] | DOUBLING).parameters
    errors = {
        name: np.linalg.norm(found[name] - value) / np.linalg.norm(value - begun[name]) for name, value in exact.items()
    }
    assert max(errors.values()) < 2e-2, max(errors, key=errors.__getitem__)


@pytest.fixture(scope="module")
def error_of():
    """The median error of the updates of three steps, as a share of each one's norm in fp32 on one process."""

    @cache
    def exact(optimizer: str, **rate: float) -> dict[str, torch.Tensor]:
        return _numbers("fp32", **OPTIMIZERS[optimizer] | rate).parameters

    @cache
    def error(optimizer: str, compute: str, layout: str = "one process") -> float:
        values = OPTIMIZERS[optimizer] | LAYOUTS[layout] | DOUBLING
        begun, ended = exact(optimizer, optimizer__lr=0.0), exact(optimizer)
        found = _numbers(compute, **values).parameters
        assert found.keys() == ended.keys()
        norm = np.linalg.norm
        return float(np.median([norm(found[name] - w) / norm(w - begun[name]) for name, w in ended.items()]))

    return error


@pytest.mark.slow  # test_optimizers.py and test_muon.py compare one update
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    slow_but(
        product(["lion", "muon"], ["tp2 sp", "pp3", "cp2", "zero3"]), every=[("lion", "zero3"), ("muon", "tp2 sp")]
    ),
)
def test_updates_whose_size_ignores_the_gradient_are_nearer_to_fp32_than_those_of_bf16(optimizer, layout, error_of):
    """Lion's sign flips where a gradient is as small as its rounding, and Muon amplifies such directions."""
    assert error_of(optimizer, "fp16", layout) < error_of(optimizer, "bf16") / 1.5


def _numbers(compute: str, **values: object) -> Numbers:
    spec = small_spec(precision__compute_dtype=compute, **values)
    return joined_stages(run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True))


def _steps_with_overflow(spec: RunSpec, poisoned: tuple[int, ...]) -> list[object]:
    """Three steps; in the poisoned ones the last rank's gradients are infinite."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model, samples = build_sharded_model(spec, mesh), RandomSamples()
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    now = 0
    if mesh.rank == dist.get_world_size() - 1:
        layer = next(iter(model.parts[-1].layers.values()))
        layer.register_full_backward_hook(
            lambda module, given, _: tuple(g if g is None or now not in poisoned else g * torch.inf for g in given)
        )
    told: list[object] = []
    for now in range(1, STEPS + 1):
        before = [to_local_no_grad(tensor).clone() for tensor in _trained(model, optimizer)]
        try:
            result = step.run(now, batches.get(now, STEPS))
        except RunEnd as ending:
            told.append(ending.reason)
            break
        after = _trained(model, optimizer)
        same = all(torch.equal(a, to_local_no_grad(b)) for a, b in zip(before, after, strict=True))
        counts = {float(state.updates) for state in optimizer._states.values()}
        told.append((_summary(result), same, counts))
    batches.close()
    return told


def _trained(model: ModelParts, optimizer: Optimizer) -> list[torch.Tensor]:
    """What an update changes."""
    return [*model.parameters(), *optimizer.states().values()]


def _summary(result: StepResult) -> tuple[object, ...]:
    assert math.isfinite(result.loss)
    assert math.isfinite(result.grad_norm) is not result.skipped
    return result.skipped, result.loss_scale, result.updates.skipped_steps, round(result.learning_rate, 9)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    slow_but(
        [*product(["adamw"], ["zero3", "tp2 sp", "pp3", "cp2"]), *product(OPTIMIZERS, ["zero3"])],
        ("adamw", "zero3"),
    ),
)
def test_an_overflow_on_one_rank_skips_on_all(optimizer, layout):
    """The second of three steps: weights, moments and their number of updates stay, the schedule waits, the scale
    halves."""
    values = OPTIMIZERS.get(optimizer, {}) | LAYOUTS[layout]
    spec = small_spec(precision__compute_dtype="fp16", precision__loss_scale={"hysteresis": 1, "window": 8}, **values)
    every = run_ranks(spec.cluster.devices_per_node, _steps_with_overflow, spec, (2,))
    assert all(told == every[0] for told in every)
    rate, first, last = spec.optimizer.lr, {1.0}, {2.0}
    if optimizer != "adamw":  # the others count no updates: under muon the matrices, under lion and sgd all
        first, last = ({0.0, 1.0}, {0.0, 2.0}) if optimizer == "muon" else ({0.0}, {0.0})
    assert every[0] == [
        ((False, 65536.0, 0, rate / 2), False, first),
        ((True, 65536.0, 1, rate), True, first),
        ((False, 32768.0, 1, rate), False, last),
    ]


def test_overflows_at_the_minimum_end_the_run():
    spec = small_spec(
        parallel__dp=2,
        precision__compute_dtype="fp16",
        precision__loss_scale={"initial": 4.0, "minimum": 4.0, "hysteresis": 2},
    )
    every = run_ranks(2, _steps_with_overflow, spec, (1, 2))
    assert every[0] == every[1]
    (first, same, counts), reason = every[0]
    assert (first[:3], same, counts) == ((True, 4.0, 1), True, {0.0})
    assert "the gradient norm of step 2 is" in reason
    assert "in samples 8 to 15, with the loss scale at its minimum of 4; the update was not made" in reason


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "zero3", every=["tp2 sp", "pp3"]))
def test_a_constant_scale_skips_steps_and_stays(layout):
    """Also where a dynamic scale at its minimum would end the run."""
    limits = {"constant": 512.0, "minimum": 1024.0, "hysteresis": 1}
    spec = small_spec(precision__compute_dtype="fp16", precision__loss_scale=limits, **LAYOUTS[layout])
    every = run_ranks(spec.cluster.devices_per_node, _steps_with_overflow, spec, (1, 2))
    assert all(told == every[0] for told in every)
    rate = spec.optimizer.lr
    assert every[0] == [
        ((True, 512.0, 1, rate / 2), True, {0.0}),
        ((True, 512.0, 2, rate / 2), True, {0.0}),
        ((False, 512.0, 2, rate / 2), False, {1.0}),
    ]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> RunSpec:
    """Ten steps whose scale is too high at first and grows later."""
    spec = ten_steps(tmp_path_factory.mktemp("tokens"))
    return with_values(
        spec,
        {
            "precision.compute_dtype": "fp16",
            "precision.loss_scale.initial": 2.0**22,
            "precision.loss_scale.window": 3,
            "precision.loss_scale.hysteresis": 1,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", *OPTIMIZERS])
def test_a_resumed_run_goes_on_with_its_scale(optimizer, scaled, tmp_path):
    """Exactly, and under another layout with the same scale, skipped steps, and losses to the rounding of fp16."""
    values = {key.replace("__", "."): value for key, value in OPTIMIZERS.get(optimizer, {}).items()}
    scaled = with_values(scaled, values)
    run_loop(scaled, tmp_path / "whole")
    whole = metrics(tmp_path / "whole")
    steps = [line for line in whole if "loss" in line]
    assert 1 <= steps[3]["skipped_steps"] < 4, "some step before the stop is skipped"
    assert max(line["loss_scale"] for line in steps[4:]) > steps[3]["loss_scale"], "the scale grows after the stop"
    skips = events(tmp_path / "whole", "skipped_step")
    assert len(skips) == steps[-1]["skipped_steps"]
    skipped = {event["step"] for event in skips}
    assert {line["step"] for line in steps if line["grad_norm"] is None} == skipped, "infinity is no JSON"
    stopped = with_values(scaled, {"train.exit_at_step": 4})
    run_loop(stopped, tmp_path / "parts")
    position = json.loads((RunDirectory(tmp_path / "parts").checkpoint(4) / "position.json").read_text())
    assert position["skipped_steps"] == steps[3]["skipped_steps"]
    assert position["loss_scale"].keys() == {"scale", "good_steps", "overflows_left"}
    shutil.copytree(tmp_path / "parts", tmp_path / "tensor")
    run_loop(scaled, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == whole
    first, second = (read_tensors(RunDirectory(tmp_path / name).checkpoint(10)) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    run_loop(with_values(scaled, {"parallel.dp": 1, "parallel.tp": 2}), tmp_path / "tensor")
    other = [line for line in metrics(tmp_path / "tensor") if "loss" in line]
    for key in ("loss_scale", "skipped_steps", "learning_rate"):
        assert [line[key] for line in other] == [line[key] for line in steps]
    np.testing.assert_allclose([line["loss"] for line in other], [line["loss"] for line in steps], rtol=1e-3)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_a_constant_scale(scaled, tmp_path):
    constant = with_values(scaled, {"precision.loss_scale.constant": 1024.0})
    run_loop(constant, tmp_path / "whole")
    run_loop(with_values(constant, {"train.exit_at_step": 4}), tmp_path / "parts")
    run_loop(constant, tmp_path / "parts")
    whole = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "parts") == whole
    assert {line["loss_scale"] for line in whole if "loss" in line} == {1024.0}
