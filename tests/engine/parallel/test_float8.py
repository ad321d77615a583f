"""fp8 linear layers: the same scales, and so the same numbers, under every layout; exact resume of delayed scaling.

Both sides compute what is not fp8 in fp32, so that they differ by the order of sums alone, until a sum moves a value
across the border of two fp8 numbers: a step of e4m3 is up to 2^-3 of a value, of e5m2 2^-2. Few values are so close to
a border; their effect on a gradient is small beside its largest value.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from float8_runs import SMALL_BLOCKS, WIDTH, assert_close, fine_spec, float8_spec, resumed, run, saved, train
from forked_ranks import run_ranks
from resumed_run import Run
from slow_cases import slow_but

from megalaunch.engine.parallel import compile as compiling
from megalaunch.engine.parallel.float8 import float8_states
from megalaunch.engine.precision import float8, policy
from megalaunch.engine.precision.amax_history import AmaxHistories
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2, "cp_comm_type": ("p2p",)},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "pp2 zero bubble": {"pp": 2, "schedule": "zero_bubble"},
    "dp2 pp2 vpp2": {"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"},
    "tp2 cp2 sp": {"tp": 2, "cp": 2, "sequence_parallel": True},
}

RECIPES = ("tensorwise", "delayed", "rowwise")
DAILY = {("tensorwise", "tp2 sp"), ("delayed", "dp2 zero3")}  # delayed under tp2, and rowwise: below


@cache
def alone(recipe: str) -> Any:
    """The numbers of one rank."""
    return run(float8_spec({}, recipe))


@pytest.mark.parametrize(
    ("recipe", "layout"), slow_but(product(RECIPES, LAYOUTS), ("delayed", "pp2 zero bubble"), every=DAILY)
)
def test_layouts_agree(recipe, layout):
    assert_close(run(float8_spec(LAYOUTS[layout], recipe)), alone(recipe))


@pytest.mark.slow
def test_layouts_agree_with_output_gates():
    gated = {"model__attention_output_gate": True}
    assert_close(run(float8_spec(LAYOUTS["tp2 sp"], "delayed", **gated)), run(float8_spec({}, "delayed", **gated)))


DEPTHS = {
    "model__mtp": {"num_layers": 2, "loss_coeff": 0.7},
    "precision__fp8": {"recipe": "delayed", "last_layers_bf16": 4},
}


@cache
def depths_alone(dtype: str) -> Any:
    """The numbers of one rank: with fp8 only MTP depths round, which are not among the last layers."""
    return run(float8_spec({}, "delayed", **DEPTHS, precision__compute_dtype=dtype))


@pytest.mark.parametrize("layout", slow_but(["tp2 sp", "pp2 zero bubble", "dp2 zero3"], "tp2 sp", every=()))
def test_layouts_agree_with_depths_of_multi_token_prediction(layout):
    assert_close(run(float8_spec(LAYOUTS[layout], "delayed", **DEPTHS)), depths_alone("fp8"))


def test_depths_of_multi_token_prediction_are_in_fp8():
    rounded, whole = depths_alone("fp8").gradients, depths_alone("fp32").gradients
    for name in ("mtp.0.projection.weight", "mtp.1.layer.mlp.down_proj.weight"):
        assert 0.005 < float((rounded[name] - whole[name]).norm() / whole[name].norm()) < 0.2


@pytest.fixture(scope="module", params=slow_but(RECIPES, "delayed"))
def one_rank(request: pytest.FixtureRequest) -> Any:
    """The recipe, and the numbers of one rank."""
    return request.param, alone(request.param)


FINE = ("rowwise", "blockwise", "mxfp8")
FINE_LAYOUTS = {
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "cp2": {"cp": 2, "cp_comm_type": ("p2p",)},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
}


@pytest.fixture(scope="module")
def one_rank_of():
    """The numbers of one rank by recipe of fine scales."""
    return cache(lambda recipe: run(fine_spec({}, recipe)))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    slow_but(
        product(FINE, FINE_LAYOUTS), ("rowwise", "tp2 sp"), slow=[("rowwise", "cp2"), ("mxfp8", "tp2 sp")], one_in=2
    ),
)
def test_layouts_agree_with_fine_scales(recipe, layout, one_rank_of, monkeypatch):
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    monkeypatch.setattr(float8, "_BLOCKS", SMALL_BLOCKS)
    assert_close(run(fine_spec(FINE_LAYOUTS[layout], recipe)), one_rank_of(recipe))


@pytest.mark.parametrize(
    "setting", slow_but([{"format": "e4m3"}, {"wgrad": False}], {"format": "e4m3"}), ids=["e4m3", "wgrad in 16 bits"]
)
def test_layouts_agree_in_other_formats_of_gradients(setting, one_rank_of, monkeypatch):
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    monkeypatch.setattr(float8, "_BLOCKS", SMALL_BLOCKS)
    fp8 = {"precision__fp8": {"recipe": "rowwise", **setting}}
    expected, default = run(fine_spec({}, "rowwise", **fp8)), one_rank_of("rowwise")
    assert_close(run(fine_spec(FINE_LAYOUTS["tp2 sp"], "rowwise", **fp8)), expected)
    assert expected.losses[0] == default.losses[0], "the forward pass is the same"
    changed = {name for name, g in expected.gradients.items() if not torch.equal(g, default.gradients[name])}
    fp8_weights = {name for name in expected.gradients if name.startswith("layers.") and "norm" not in name}
    assert fp8_weights <= changed
    assert ("embedding.weight" in changed) == ("format" in setting), "its gradient passed the layers' input gradients"


# Graphs of the first step, of later ones and of validation, for all layers alike; exchanges of tp end a graph.
COMPILED = {"one rank": 3, "tp2 sp": 8, "dp2 zero3": 3}


@pytest.mark.parametrize("layout", slow_but(COMPILED, every=["one rank"]))  # test_float8_matmuls.py has a quick one
def test_a_compiled_decoder_with_delayed_scales_has_the_numbers_of_an_eager_one(layout, monkeypatch):
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    sizes = FINE_LAYOUTS.get(layout, {})
    eager, spec = run(fine_spec(sizes, "delayed")), fine_spec(sizes, "delayed", train__compile=True)
    found = run_ranks(spec.cluster.devices_per_node, _train_compiled, spec, COMPILED[layout], timeout=180)[0]
    assert_close(found, eager)
    if layout == "one rank":
        assert found.losses == eager.losses


@pytest.mark.slow
@pytest.mark.release  # test_compile.py and test_float8_matmuls.py hold its parts
def test_a_compiled_decoder_has_the_numbers_of_an_eager_one(one_rank_of, monkeypatch):
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    (found,) = run_ranks(1, _train_compiled, fine_spec({}, "rowwise", train__compile=True), 2, timeout=180)
    assert_close(found, one_rank_of("rowwise"))


def _train_compiled(spec: Any, graphs: int) -> Any:
    from torch._dynamo.utils import counters

    numbers = train(spec, True)
    assert 1 <= counters["stats"]["unique_graphs"] <= graphs, dict(counters["stats"])
    return numbers


def test_recomputation_casts_again_to_the_same_numbers(one_rank):
    recipe, expected = one_rank
    values = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
    found = run(float8_spec({}, recipe, **values))
    assert found.losses == expected.losses
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=0)


def test_norms_and_activations_are_recomputed_to_the_same_numbers(one_rank):
    """With delayed scales: a value that is cast again is no larger than before."""
    recipe, expected = one_rank
    found = run(float8_spec({}, recipe, recompute__granularity="selective", recompute__modules=["norm", "activation"]))
    assert found.losses == expected.losses
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=0)


def test_fp8_rounds_and_leaves_layers_in_bf16_alone(one_rank):
    recipe, expected = one_rank
    whole = run(float8_spec({}, recipe, precision__compute_dtype="fp32"))
    off = [float((g - whole.gradients[n]).norm() / whole.gradients[n].norm()) for n, g in expected.gradients.items()]
    assert 0.005 < median(off) < 0.2, "fp8 has 3 or 2 bits of mantissa"
    spec = float8_spec({}, recipe, precision__fp8={"recipe": recipe, "first_layers_bf16": 2, "last_layers_bf16": 2})
    assert run(spec).losses == whole.losses


@pytest.mark.parametrize("layout", slow_but(["one rank", "tp2 sp"], "one rank"))
def test_delayed_scales_resume(layout, tmp_path):
    """The amax histories are in the checkpoint: a resumed run goes on to the bit, under another layout as nearly."""
    one = float8_spec({}, "delayed")
    (through,) = run_ranks(1, saved, one, tmp_path)
    (checkpoint,) = tmp_path.rglob("step_00000002")
    spec = one if layout == "one rank" else float8_spec(LAYOUTS[layout], "delayed")
    found = run_ranks(spec.cluster.devices_per_node, resumed, spec, checkpoint)[0]
    tolerance = 0.0 if layout == "one rank" else 1e-4
    assert found.losses == pytest.approx(through.losses, rel=tolerance, abs=0)


@pytest.mark.slow
def test_delayed_scales_beside_layers_in_bf16(tmp_path):
    """A history belongs to a layer: those in bf16 have none, and under pp2 none is in the first stage."""
    ends = {"precision__fp8": {"recipe": "delayed", "first_layers_bf16": 2, "last_layers_bf16": 1}}
    (through,) = run_ranks(1, saved, float8_spec({}, "delayed", **ends), tmp_path)
    (checkpoint,) = tmp_path.rglob("step_00000002")
    histories = [name for name in read_tensor_index(checkpoint) if name.startswith("fp8.")]
    assert {name.split(".")[2] for name in histories} == {"2"}
    assert len(histories) == 7
    ranks = run_ranks(2, resumed, float8_spec(FINE_LAYOUTS["pp2"], "delayed", **ends), checkpoint)
    found = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    assert_close(replace(ranks[0], gradients=found), through)


def _amaxes(spec: Any) -> dict[str, torch.Tensor]:
    """The newest entry of each history after a step."""
    policy._FORMATS["fp8"] = torch.float32
    run = Run(spec)
    run.steps(range(1, 2))
    return {name: history[0] for name, history in float8_states(run.model).items()}


def test_shape_inference_of_a_pipeline_makes_no_entry():
    """Its activations are uninitialised memory."""
    pipeline = float8_spec({"pp": 2, "schedule": "1f1b"}, "delayed")
    first, last = run_ranks(2, _amaxes, pipeline)
    (expected,) = run_ranks(1, _amaxes, float8_spec({}, "delayed"))
    assert first.keys() | last.keys() == expected.keys()
    for name, amaxes in (first | last).items():
        np.testing.assert_allclose(amaxes, expected[name], rtol=1e-2, err_msg=name)  # gradients in fp8 may step


@pytest.mark.slow
def test_a_run_that_loses_its_histories_goes_on_with_other_numbers(tmp_path, monkeypatch):
    """What the test above would not notice otherwise."""
    one = float8_spec({}, "delayed", optimizer__lr=0.02)
    (through,) = run_ranks(1, saved, one, tmp_path)
    (checkpoint,) = tmp_path.rglob("step_00000002")
    monkeypatch.setattr(AmaxHistories, "restored", lambda histories: None)
    assert run_ranks(1, resumed, one, checkpoint)[0].losses != through.losses
