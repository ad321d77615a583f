"""Delayed scaling by Transformer Engine, on a stand-in with histories: entries, scales, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformer_engine_stand_in as stand_in
from float8_runs import assert_close, float8_spec, resumed, run, saved
from forked_ranks import run_ranks
from oracle import UnevenRows, joined_stages
from resumed_run import Run
from slow_cases import slow_but
from transformer_engine_runs import install_stand_in, library_spec, train_in_fp8

from megalaunch.engine.parallel.float8 import float8_states
from megalaunch.engine.precision import policy
from megalaunch.engine.precision.amax_history import AmaxHistories
from megalaunch.engine.precision.transformer_engine import Autocast, load_transformer_engine
from megalaunch.engine.precision.transformer_engine_histories import HistoriesOfLayer, TransformerEngineHistories
from megalaunch.engine.train.evaluate import validation_loss
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index
from megalaunch.schema.precision import Float8Spec

LENGTH = 8
VALUES: dict[str, Any] = {"model__num_query_groups": 4, "batch__micro_batch_size": 2, "batch__global_batch_size": 8}
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "pp2 1f1b": {"pp": 2, "schedule": "1f1b"},
    "cp2": {"cp": 2, "cp_comm_type": ("p2p",)},
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    install_stand_in(monkeypatch)
    stand_in.STATE.quantize = True


def delayed_spec(layout: dict[str, Any], **values: Any) -> Any:
    fp8 = {"recipe": "delayed", "implementation": "transformer_engine", "amax_history_len": LENGTH}
    return library_spec(layout, precision__fp8=fp8, **{**VALUES, **values})


def trained(spec: Any) -> Any:
    return joined_stages(run_ranks(spec.cluster.devices_per_node, train_in_fp8, spec))


@pytest.mark.parametrize("layout", slow_but(["one rank", "tp2 sp", "dp2 zero3", "cp2"], "one rank"))
def test_scales_are_the_native_ones_if_a_step_is_a_microbatch(layout, monkeypatch):
    """And if the native ones begin at 1, as Transformer Engine's do."""
    sizes = LAYOUTS[layout]
    batch = {"batch__micro_batch_size": 4 // sizes.get("dp", 1), "batch__global_batch_size": 4}
    found = trained(delayed_spec(sizes, **batch))
    made = AmaxHistories.__init__

    def with_scales(self: AmaxHistories, *args: Any) -> None:
        made(self, *args)
        self.has_scales = True

    monkeypatch.setattr(AmaxHistories, "__init__", with_scales)
    fp8 = {"recipe": "delayed", "amax_history_len": LENGTH}
    expected = run(float8_spec(sizes, "delayed", precision__fp8=fp8, model__num_query_groups=4, **batch))
    if layout == "one rank":
        assert found.losses == expected.losses
        assert found.validation == expected.validation
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=0)
    assert_close(found, expected)


def _histories(spec: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """The entries that a step makes on this rank, and the histories of all its layers."""
    policy._FORMATS["fp8"] = torch.float32
    one = Run(spec)
    one.steps(range(1, 2))
    return stand_in.STATE.manager.entries, dict(float8_states(one.model))


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "one rank", every=["pp2 1f1b", "dp2 zero3"]))
def test_each_microbatch_makes_an_entry(layout):
    """Shape inference of a pipeline makes none that stays: its activations are uninitialised memory."""
    sizes = LAYOUTS[layout]
    microbatches = 4 // sizes.get("dp", 1)
    spec = delayed_spec(sizes)
    ranks = run_ranks(spec.cluster.devices_per_node, _histories, spec)
    for entries, states in ranks:
        assert entries == microbatches + ("pp" in sizes)
        histories = {name: value for name, value in states.items() if name.endswith("amax_history")}
        assert histories
        for name, history in histories.items():
            made = (history > 0).sum(0).tolist()
            # Weights are cast once in a step.
            assert made == [microbatches, 1, microbatches], name
            assert (history[:microbatches, 0] > 0).all(), "the newest first"
    for _, states in ranks[1:] if "pp" not in sizes else ():  # ranks of a stage hold the same
        for name, value in ranks[0][1].items():
            np.testing.assert_array_equal(states[name], value)


def _losses(spec: Any, validates: bool) -> list[float]:
    """Of four steps, with or without a validation after two."""
    policy._FORMATS["fp8"] = torch.float32
    one = Run(spec)
    losses = one.steps(range(1, 3))
    if validates:
        samples, micro = UnevenRows(), spec.batch.micro_batch_size
        assert validation_loss(one.forward_backward, samples, micro, one.mesh, lambda problem: True) is not None
    return losses + one.steps(range(3, 5))


@pytest.mark.parametrize("layout", slow_but(["one rank", "pp2 1f1b"], "one rank"))
def test_a_validation_leaves_no_trace(layout):
    """The weights are cast again after it, or their amaxes would be lost."""
    spec = delayed_spec(LAYOUTS[layout], optimizer__lr=0.05)
    devices = spec.cluster.devices_per_node
    assert run_ranks(devices, _losses, spec, True)[0] == run_ranks(devices, _losses, spec, False)[0]


def _resumed(spec: Any, root: Any) -> Any:
    (checkpoint,) = root.rglob("step_00000002")
    ranks = run_ranks(spec.cluster.devices_per_node, resumed, spec, checkpoint)
    return replace(ranks[0], gradients={name: g for rank in ranks for name, g in rank.gradients.items()})


RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}, {}),
    "tp2 sp": (LAYOUTS["tp2 sp"], LAYOUTS["tp2 sp"], {}),
    "one rank to tp2 sp": ({}, LAYOUTS["tp2 sp"], {}),
    "tp2 sp to one rank": (LAYOUTS["tp2 sp"], {}, {}),
    "one rank to pp2": ({}, LAYOUTS["pp2 1f1b"], {}),
    "ep2": ({"dp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"model__moe": MOE}),
    "ep2 to dp2": ({"dp": 2, "ep": 2}, {"dp": 2}, {"model__moe": MOE}),
}


@pytest.mark.parametrize("case", slow_but(RESUMES, "one rank", "one rank to tp2 sp", every=["ep2", "one rank to pp2"]))
def test_a_run_resumes(case, tmp_path):
    """To the bit under its layout: histories and scales are in the checkpoint."""
    before, after, values = RESUMES[case]
    spec, other = delayed_spec(before, **values), delayed_spec(after, **values)
    through, *_ = run_ranks(spec.cluster.devices_per_node, saved, spec, tmp_path)
    found = _resumed(other, tmp_path)
    if before == after:
        assert found.losses == through.losses
    assert found.losses == pytest.approx(through.losses, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["amax_history", "scale"])
def test_a_run_that_loses_its_state_goes_on_with_other_numbers(lost, tmp_path, monkeypatch):
    """What the test above would not notice otherwise."""
    spec = delayed_spec({})
    (through,) = run_ranks(1, saved, spec, tmp_path)
    restored = TransformerEngineHistories.restored

    def restored_without(self: TransformerEngineHistories) -> None:
        for name, state in self._states.items():
            if name.endswith(lost):
                state.fill_(float(lost == "scale"))
        restored(self)

    monkeypatch.setattr(TransformerEngineHistories, "restored", restored_without)
    assert _resumed(spec, tmp_path).losses != through.losses


@pytest.mark.slow
def test_a_checkpoint_names_projections_and_experts(tmp_path):
    """Whether or not a layer computes several of them."""
    spec = delayed_spec({"dp": 2, "ep": 2, "tp": 1}, model__moe=MOE)
    run_ranks(2, saved, spec, tmp_path)
    (checkpoint,) = tmp_path.rglob("step_00000002")
    shapes = {name: tuple(stored.shape) for name, stored in read_tensor_index(checkpoint).items() if "fp8." in name}
    assert shapes["fp8.layers.0.attention.q_proj.amax_history"] == (LENGTH, 3)
    assert shapes["fp8.layers.0.attention.q_proj.scale"] == (3,)
    assert shapes["fp8.layers.0.mlp.experts.up_proj.amax_history"] == (4, LENGTH, 3)
    assert shapes["fp8.layers.0.mlp.experts.up_proj.scale"] == (4, 3)


def test_a_layer_takes_the_largest_amaxes_of_all_that_it_stands_for():
    """And the smallest scale, of those that have noted an amax."""
    settings, library = Float8Spec(recipe="delayed", amax_history_len=3), load_transformer_engine()
    fused = library.linear(16, 32, bias=False, device="cpu")
    experts = library.grouped_linear(2, 16, 16, bias=False, device="cpu")
    layers = [HistoriesOfLayer(fused, ("q", "k")), HistoriesOfLayer(experts, ("up",), matmuls=2, experts=4)]
    autocast = Autocast(library, settings, dist.group.WORLD)
    histories = TransformerEngineHistories(layers, autocast, lambda: None)
    states = histories.states()
    for name, amaxes, scale in (("q", (5.0, 1.0), 2.0), ("k", (3.0, 4.0), 7.0)):
        states[f"fp8.{name}.amax_history"][:2] = torch.tensor(amaxes).unsqueeze(1)
        states[f"fp8.{name}.scale"].fill_(scale)
    for expert, (amax, scale) in enumerate([(0.0, 1.0), (2.0, 8.0), (6.0, 9.0), (3.0, 4.0)]):
        states["fp8.up.amax_history"][expert, 0] = amax
        states["fp8.up.scale"][expert] = scale
    histories.restored()
    forward, backward = (fused.get_fp8_meta_tensors()[name] for name in ("scaling_fwd", "scaling_bwd"))
    # Transformer Engine's order: the entry being made, the oldest, the newest; input, weight, output.
    assert forward[1].tolist() == [[0, 0, 0], [4, 4, 0], [5, 5, 0]]
    assert backward[1].tolist() == [[0, 0], [4, 0], [5, 0]]
    assert (forward[0].tolist(), backward[0].tolist()) == ([2, 2, 1], [2, 1])
    of_experts = experts.get_fp8_meta_tensors()["scaling_fwd"]
    assert of_experts[1][2].tolist() == [6, 6, 0, 3, 3, 0], "experts 0 and 2, then 1 and 3"
    assert of_experts[0].tolist() == [9, 9, 1, 4, 4, 1]
    assert histories.states()["fp8.k.amax_history"].tolist() == [[5, 5, 5], [4, 4, 4], [0, 0, 0]]
