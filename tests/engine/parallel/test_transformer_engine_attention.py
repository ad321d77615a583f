"""Attention in fp8 by Transformer Engine, on its stand-in: scales, layouts, checkpoints, what a version lacks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import te_attention_stand_in
import torch
import transformer_engine_stand_in as stand_in
from float8_runs import assert_close, resumed, run, saved
from forked_ranks import RanksFailed, run_ranks
from oracle import joined_stages
from resumed_run import Run
from slow_cases import slow_but
from transformer_engine_runs import library_spec, stand_in_with_attention, train_in_fp8

from megalaunch.engine.parallel.float8 import float8_states
from megalaunch.engine.precision import policy
from megalaunch.engine.precision.transformer_engine import UnknownTransformerEngine, load_transformer_engine
from megalaunch.engine.precision.transformer_engine_histories import TransformerEngineHistories
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index

LENGTH = 8
VALUES: dict[str, Any] = {
    "model__attention_backend": "te",
    "model__num_query_groups": 4,
    "batch__micro_batch_size": 2,
    "batch__global_batch_size": 8,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "pp2 1f1b": {"pp": 2, "schedule": "1f1b"},
    "cp2 a2a": {"cp": 2, "cp_comm_type": ("a2a",)},
    "cp2 p2p": {"cp": 2, "cp_comm_type": ("p2p",)},
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    with stand_in_with_attention(monkeypatch):
        yield


def attention_spec(layout: dict[str, Any], fp8: dict[str, Any] | None = None, **values: Any) -> Any:
    given = {"recipe": "delayed", "implementation": "transformer_engine", "amax_history_len": LENGTH}
    given |= {"dot_product_attention": True, **(fp8 or {})}
    return library_spec(layout, precision__fp8=given, **{**VALUES, **values})


def trained(spec: Any) -> Any:
    return joined_stages(run_ranks(spec.cluster.devices_per_node, train_in_fp8, spec))


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tp2 sp", every=["cp2 a2a", "pp2 1f1b"]))
def test_a_layout_has_the_numbers_of_one_process(layout):
    """But for a ring without casts: it casts the gradients of keys and values before it adds them up."""
    sizes, casts = LAYOUTS[layout], layout != "cp2 p2p"
    stand_in.STATE.quantize = casts
    microbatches = sizes.get("pp", 1)
    specs = [
        attention_spec(each, batch__micro_batch_size=4 // microbatches // each.get("dp", 1), batch__global_batch_size=4)
        for each in (sizes, {})
    ]
    found, expected = map(trained if casts else run, specs)
    assert_close(found, expected)


def test_attention_in_fp8_changes_the_numbers():
    """Or the tests here would prove nothing."""
    in_8_bits, in_16_bits = (trained(attention_spec({}, {"dot_product_attention": on})) for on in (True, False))
    assert in_8_bits.losses != in_16_bits.losses
    assert in_8_bits.losses == pytest.approx(in_16_bits.losses, rel=0.01)


def _calls(spec: Any) -> tuple[list[int], int, int, dict[str, torch.Tensor]]:
    """How often each layer computed in fp8 in a step, how many calls there were, the entries, and the histories."""
    policy._FORMATS["fp8"] = torch.float32
    one = Run(spec)
    one.steps(range(1, 2))
    state = te_attention_stand_in.STATE
    layers = list(dict.fromkeys(state.in_float8))
    counts = [state.in_float8.count(layer) for layer in layers]
    return counts, len(state.calls), stand_in.STATE.manager.entries, dict(float8_states(one.model))


def test_each_layer_has_scales_of_its_own_and_an_entry_for_each_microbatch():
    ((counts, calls, entries, states),) = run_ranks(1, _calls, attention_spec({}))
    assert (counts, calls, entries) == ([4] * 4, 16, 4), "4 layers, 4 microbatches"
    histories = [torch.as_tensor(states[f"fp8.layers.{n}.attention.core_attention.amax_history"]) for n in range(4)]
    for history in histories:
        assert history.shape == (LENGTH, 15)
        made = (history > 0).sum(0)
        assert made[[2, 3, 8, 9, 12, 14]].tolist() == [4] * 6, "inputs, outputs, weights, and their gradients"
        assert made.sum() == 24
    assert not torch.equal(histories[0], histories[1])


def test_attention_of_layers_in_bf16_stays_there():
    """The autocast of the pass spans them; the layer after them is no first one again, which would make an entry."""
    spec = attention_spec({}, {"first_layers_bf16": 1, "last_layers_bf16": 1})
    ((counts, calls, entries, states),) = run_ranks(1, _calls, spec)
    assert (counts, calls, entries) == ([4] * 2, 16, 4)
    names = sorted(name for name in states if name.endswith("core_attention.scale"))
    assert names == [f"fp8.layers.{n}.attention.core_attention.scale" for n in (1, 2)]
    gradients = torch.as_tensor(states["fp8.layers.1.attention.core_attention.amax_history"])[:, 9:]
    assert (gradients > 0).sum(0).max() == 4


def _resumed(spec: Any, root: Any) -> Any:
    (checkpoint,) = root.rglob("step_00000002")
    ranks = run_ranks(spec.cluster.devices_per_node, resumed, spec, checkpoint)
    return replace(ranks[0], gradients={name: g for rank in ranks for name, g in rank.gradients.items()})


@pytest.mark.parametrize("after", slow_but(["one rank", "tp2 sp", "pp2 1f1b"], "one rank"))
def test_a_run_resumes(after, tmp_path):
    """To the bit under its layout: its scales and histories are in the checkpoint."""
    spec = attention_spec({})
    (through,) = run_ranks(1, saved, spec, tmp_path)
    found = _resumed(spec if after == "one rank" else attention_spec(LAYOUTS[after]), tmp_path)
    if after == "one rank":
        assert found.losses == through.losses
    assert found.losses == pytest.approx(through.losses, rel=1e-3)
    (checkpoint,) = tmp_path.rglob("step_00000002")
    stored = read_tensor_index(checkpoint)["fp8.layers.0.attention.core_attention.amax_history"]
    assert tuple(stored.shape) == (LENGTH, 15)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["amax_history", "scale"])
def test_a_run_that_loses_the_state_of_attention_goes_on_with_other_numbers(lost, tmp_path, monkeypatch):
    """What the test above would not notice otherwise."""
    spec = attention_spec({})
    (through,) = run_ranks(1, saved, spec, tmp_path)
    restored = TransformerEngineHistories.restored

    def restored_without(self: TransformerEngineHistories) -> None:
        for name, state in self._states.items():
            if name.endswith(f"core_attention.{lost}"):
                state.fill_(float(lost == "scale"))
        restored(self)

    monkeypatch.setattr(TransformerEngineHistories, "restored", restored_without)
    assert _resumed(spec, tmp_path).losses != through.losses


def test_what_a_version_lacks_is_named_where_attention_computes_in_fp8(monkeypatch):
    class Without:
        def __init__(self, fp8_format=None, margin=0, amax_history_len=1024): ...

    monkeypatch.setattr(sys.modules["transformer_engine.common.recipe"], "DelayedScaling", Without)
    assert load_transformer_engine()
    with pytest.raises(UnknownTransformerEngine) as refused:
        load_transformer_engine(float8_attention=True)
    assert str(refused.value) == (
        "the installed transformer_engine has no common.recipe.DelayedScaling(fp8_dpa=); "
        "install another version of it, or set precision.fp8.dot_product_attention=false"
    )


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_run_that_resumes_with_another_value_is_refused(before, tmp_path):
    specs = [attention_spec({}, {"dot_product_attention": on}) for on in (before, not before)]
    run_ranks(1, saved, specs[0], tmp_path)
    problem = "unexpected" if before else "missing"
    with pytest.raises(RanksFailed, match=rf"{problem} in the checkpoint: fp8\.layers\.0\.attention\.core_attention"):
        _resumed(specs[1], tmp_path)
