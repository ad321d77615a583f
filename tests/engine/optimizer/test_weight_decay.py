"""Weight decay that grows, and that of QK norms: the same updates under every layout, Megatron's, and resumption."""

from __future__ import annotations

import json
import shutil
from itertools import product

import pytest
import torch
from looped_run import metrics, run_loop, ten_steps
from oracle import hold_to_one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.weight_decay import weight_decay
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values
from megalaunch.schema.schedule import ScheduleSpec

GROWING = {
    "schedule__weight_decay_incr_style": "cosine",
    "schedule__start_weight_decay": 0.5,
    "schedule__end_weight_decay": 8.0,
    "schedule__weight_decay_incr_steps": 4,
}
OPTIMIZERS = {
    "adamw": {},
    "sgd": {"optimizer__name": "sgd", "optimizer__lr": 0.03},
    "lion": {"optimizer__name": "lion"},
    "muon": {"optimizer__name": "muon", "optimizer__lr": 0.01, "optimizer__nesterov": True},
}
LAYOUTS = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "pp3": {"parallel__pp": 3, "parallel__schedule": "1f1b"},
    "cp2": {"parallel__cp": 2},
    "zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
}


def _growing(style: str, start: float, end: float, steps: int) -> ScheduleSpec:
    return ScheduleSpec(
        weight_decay_incr_style=style, start_weight_decay=start, end_weight_decay=end, weight_decay_incr_steps=steps
    )


@pytest.mark.parametrize(
    ("style", "values"), [("linear", (0.01, 0.055, 0.1, 0.1)), ("cosine", (0.01, 0.055, 0.1, 0.1))]
)
def test_it_grows_from_start_to_end(style, values):
    schedule = _growing(style, 0.01, 0.1, 10)
    assert [weight_decay(schedule, 7.0, step) for step in (0, 5, 10, 11)] == pytest.approx(values)
    assert weight_decay(schedule, 7.0, 2) == pytest.approx({"linear": 0.028, "cosine": 0.018594}[style], rel=1e-4)


def test_a_constant_one_is_that_of_the_optimizer():
    assert weight_decay(ScheduleSpec(), 0.3, 5) == 0.3


def test_an_unresolved_horizon_is_named():
    with pytest.raises(ValueError, match=r"schedule\.weight_decay_incr_steps"):
        weight_decay(ScheduleSpec(weight_decay_incr_style="linear"), 0.1, 1)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("batch", [1, 6])
def test_it_is_that_of_megatron_core(style, batch):
    """At every position in samples, also past the end; a rampup advances it by parts of a step."""
    module = pytest.importorskip(
        "megatron.core.optimizer_param_scheduler",
        reason="megatron-core is not installed (pip install megalaunch[parity])",
    )

    class Groups:
        param_groups = ({"wd_mult": 1.0}, {"wd_mult": 0.0})

    start, end, horizon = (0.1, 0.1, 40) if style == "constant" else (0.02, 0.3, 40)
    scheduler = module.OptimizerParamScheduler(
        Groups(), 0.0, 1e-3, 0.0, 0, horizon * batch, "constant", start, end, horizon * batch, style
    )
    schedule, counted = _growing(style, start, end, horizon), 0
    for samples in [0, 1, 2, 3, *[batch] * (horizon + 3)]:
        scheduler.step(samples)
        counted += samples
        expected, without = (group["weight_decay"] for group in Groups.param_groups)
        assert weight_decay(schedule, end, counted / batch) == pytest.approx(expected, rel=1e-12)
        assert without == 0.0


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(
        product(OPTIMIZERS, LAYOUTS),
        ("adamw", "zero3"),
        every=[("sgd", "pp3"), ("lion", "tp2 sp"), ("muon", "zero3"), ("adamw", "cp2")],
    ),
)
def test_updates_equal_one_process(name, layout):
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **GROWING, **OPTIMIZERS[name], **LAYOUTS[layout]))


QK_NORMS = {
    "head": {"model__qk_norm": "head"},
    "full": {"model__qk_norm": "full"},
    "layernorm": {"model__qk_norm": "head", "model__norm": "layernorm"},
    "plus one": {"model__qk_norm": "head", "model__norm_plus_one": True},
}


@pytest.mark.parametrize(
    ("norm", "name", "layout"),
    slow_but(
        [
            *product(["head", "full", "plus one"], ["adamw"], LAYOUTS),
            *product(["layernorm"], ["sgd"], LAYOUTS),  # AdamW takes the rounding of its biases' tiny gradients whole
            *product(["head"], ["sgd", "lion", "muon"], ["zero3"]),
        ],
        ("head", "adamw", "zero3"),
        ("full", "adamw", "tp2 sp"),
        every=[("layernorm", "sgd", "pp3"), ("plus one", "adamw", "cp2"), ("head", "muon", "zero3")],
    ),
)
def test_qk_norms_decay_alike_on_one_process(norm, name, layout):
    decay = {"optimizer__apply_wd_to_qk_layernorm": True, "optimizer__weight_decay": 3.0}
    values = decay | QK_NORMS[norm] | OPTIMIZERS[name] | LAYOUTS[layout]
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **values))


def _decaying(applied: bool, **model: object) -> tuple[set[str], dict[str, int]]:
    """Names of the parameters that an update without gradients shrinks, and the dims of all parameters."""
    values = {f"model__{key}": value for key, value in {"qk_norm": "head", **model}.items()}
    spec = small_spec(optimizer__apply_wd_to_qk_layernorm=applied, optimizer__weight_decay=0.5, **values)
    decoder = build_decoder(spec.model)
    for parameter in decoder.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    Optimizer(ModelParts(decoder), spec.optimizer, spec.precision).step(0.1)
    named = dict(decoder.named_parameters())
    return {name for name, p in named.items() if torch.allclose(p, torch.tensor(0.95))}, {
        name: p.ndim for name, p in named.items()
    }


@pytest.mark.parametrize("applied", [False, True])
def test_qk_norms_decay_only_on_request(applied):
    decaying, dims = _decaying(applied)
    vectors = {name for name, ndim in dims.items() if ndim == 1}
    norms = {f"layers.{layer}.attention.{part}_norm.weight" for layer in range(3) for part in "qk"}
    assert norms < vectors
    assert decaying == dims.keys() - (vectors - norms if applied else vectors)


@pytest.mark.slow
@pytest.mark.parametrize("applied", [False, True])
def test_the_parameters_that_decay_are_those_of_megatron_core(applied):
    megatron = pytest.importorskip(
        "megatron.core.optimizer", reason="megatron-core is not installed (pip install megalaunch[parity])"
    )
    (without_decay,) = megatron.get_standard_config_overrides(
        megatron.OptimizerConfig(apply_wd_to_qk_layernorm=applied)
    )
    ours = {"q_layernorm": "q_norm", "k_layernorm": "k_norm", "linear_proj": "o_proj"}
    decaying, dims = _decaying(applied, norm="layernorm", attention_output_bias=True)
    for theirs, name in ours.items():
        for kind in ("weight", "bias"):
            parameter = f"layers.0.attention.{name}.{kind}"
            tensor = torch.nn.Parameter(torch.zeros([2] * dims[parameter]))
            spared = without_decay.matches(tensor, f"decoder.layers.0.self_attention.{theirs}.{kind}")
            assert (parameter in decaying) is not spared, parameter


def test_a_rampup_advances_it_by_its_samples():
    ramp = {"batch__rampup_batch_size": "0:4,64:8", "batch__micro_batch_size": 1}
    hold_to_one_process(small_spec(**GROWING, **LAYOUTS["zero3"], **ramp))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_with_its_decay(name, tmp_path):
    """To the bit, and under another layout with the same values."""
    values = {key.replace("__", "."): value for key, value in (GROWING | OPTIMIZERS[name]).items()}
    spec = with_values(ten_steps(tmp_path), {**values, "schedule.weight_decay_incr_steps": 8})
    run_loop(spec, tmp_path / "whole")
    run_loop(with_values(spec, {"train.exit_at_step": 4}), tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "tensor")
    run_loop(spec, tmp_path / "parts")
    run_loop(with_values(spec, {"parallel.dp": 1, "parallel.tp": 2}), tmp_path / "tensor")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    first, second = (read_tensors(RunDirectory(tmp_path / name).checkpoint(10)) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for run in ("whole", "parts", "tensor"):
        lines = [line for line in read_lines(RunDirectory(tmp_path / run).metrics) if "loss" in line]
        assert [line["weight_decay"] for line in lines] == [weight_decay(spec.schedule, 0.1, n) for n in range(1, 11)]


def test_other_runs_have_no_value_of_it_in_their_metrics(tmp_path):
    run_loop(with_values(ten_steps(tmp_path), {"train.exit_at_step": 1}), tmp_path / "run")
    assert "weight_decay" not in json.loads(RunDirectory(tmp_path / "run").metrics.read_text().splitlines()[0])
