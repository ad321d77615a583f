"""The balanced load of experts under every kind of layout, held to one process: losses, gradients, updates."""

import shutil
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from forked_ranks import run_ranks
from looped_run import run_loop, ten_steps
from oracle import assert_same, hold_to_one_process, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.checkpoint import CheckpointSpec
from megalaunch.schema.moe import MoESpec

SOFTMAX = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
BALANCED = SOFTMAX | {"balance_loss": "batch", "balance_loss_coeff": 0.5, "z_loss_coeff": 0.1}
DEEPSEEK = {
    "num_experts": 8,
    "top_k": 4,
    "ffn_hidden_size": 16,
    "shared_ffn_hidden_size": 16,
    "shared_expert_gate": True,
    "first_k_dense_replace": 1,
    "score": "sigmoid",
    "scaling_factor": 2.5,
    "num_groups": 4,
    "top_k_groups": 2,
    "balance_bias": True,
    "balance_bias_rate": 0.05,
    "balance_loss": "sequence",
    "balance_loss_coeff": 0.5,
}
MODELS = {"batch": BALANCED, "sequence": DEEPSEEK}

LAYOUTS = {
    "zero1": {"dp": 2, "data_sharding": "optim"},
    "zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "pp2 zero bubble": {"pp": 2, "schedule": "zero_bubble"},
    "ep2tp2sp": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "ep2cp2": {"cp": 2, "ep": 2},
}


def expert_spec(moe, model=None, **parallel):
    layout = {f"parallel__{key}": value for key, value in ({"dp": 1} | parallel).items()}
    return small_spec(model__moe=moe, model__num_layers=4, **(model or {}), **layout)


RECOMPUTED = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2tp2sp": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "ep2pp2 zero bubble": {"dp": 2, "ep": 2, "pp": 2, "schedule": "zero_bubble"},
}


PARTS = [("batch", ["norm", "moe"]), ("sequence", ["moe"]), ("sequence", ["norm", "activation", "shared_experts"])]
DAILY_RECOMPUTED = [(*PARTS[0], "ep2"), (*PARTS[2], "ep2tp2sp")]


@pytest.mark.parametrize(
    ("model", "modules", "name"),
    slow_but([(*part, name) for part in PARTS for name in RECOMPUTED], (*PARTS[1], "ep2"), every=DAILY_RECOMPUTED),
)
def test_recomputed_experts_have_the_numbers_of_one_process(model, modules, name):
    """Tokens are dispatched again in the backward pass; loads and losses are counted once."""
    again = {"recompute__granularity": "selective", "recompute__modules": modules}
    spec = expert_spec(MODELS[model], again, **RECOMPUTED[name])
    every = run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True)
    assert_same(joined_stages(every), alone(model))


LATENT = {
    "model__mtp": {"num_layers": 1, "loss_coeff": 0.5},
    "model__mla": {
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "model__num_query_groups": 6,
    "model__head_dim": 10,
    "model__init_std": 0.2,
}
LATENT_LAYOUTS = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2tp2sp": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "ep2cp2": {"cp": 2, "ep": 2},
    "ep2pp2": {"dp": 2, "ep": 2, "pp": 2, "schedule": "1f1b"},
    "ep2 zero3": {"dp": 4, "ep": 2, "data_sharding": "optim_grads_params"},
    "ep2 zero2": {"dp": 4, "ep": 2, "data_sharding": "optim_grads"},
    "ep2 zero1": {"dp": 4, "ep": 2, "data_sharding": "optim"},
    "ep2dp2": {"dp": 4, "ep": 2, "data_sharding": "no_shard"},
    "ep2 hsdp": {"dp": 4, "ep": 2, "dp_replicate": 2, "data_sharding": "optim_grads_params"},
    "ep4": {"dp": 4, "ep": 4},
    "etp2": {"dp": 2, "etp": 2},
    "ep2pp2 gpipe": {"dp": 2, "ep": 2, "pp": 2, "schedule": "gpipe"},
    "ep2pp2 interleaved": {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"},
    "ep2pp2 zero bubble": {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "schedule": "zero_bubble"},
    "ep2pp2 zbv": {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "schedule": "zbv"},
    "ep2dp2tp2sp": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2},
    "ep4dp2tp2sp": {"dp": 4, "tp": 2, "sequence_parallel": True, "ep": 4},
}


@cache
def alone(model):
    """Three steps on one rank, with the microbatches of the layouts."""
    return joined_stages(run_ranks(1, on_ranks, expert_spec(MODELS[model]), True))


OTHERS = sorted(LATENT_LAYOUTS.keys() - LAYOUTS.keys())  # each of them daily with latent attention
QUICK = [("sequence", "zero3"), ("batch", "pp2 zero bubble")]
DAILY = [*product(MODELS, ["zero3", "pp2 zero bubble"]), ("sequence", "ep2tp2sp"), ("sequence", "ep2cp2")]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *slow_but(product(MODELS, LAYOUTS), *QUICK, every=DAILY),
        *slow_but(product(["batch"], OTHERS), every=[("batch", "ep2 hsdp")]),
    ],
)
def test_layouts_have_the_numbers_of_one_process(model, name):
    spec = expert_spec(MODELS[model], **{**LATENT_LAYOUTS, **LAYOUTS}[name])
    every = run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True)
    assert_same(joined_stages(every), alone(model))


@cache
def latent_alone():
    """The same with latent attention."""
    return joined_stages(run_ranks(1, on_ranks, expert_spec(DEEPSEEK, LATENT), True))


# With other attention test_expert_layouts.py and the test above hold the others to one process.
LATENT_DAILY = ["ep2pp2 zbv"]


@pytest.mark.parametrize("name", slow_but(list(LATENT_LAYOUTS), "ep2", every=LATENT_DAILY))
def test_latent_attention_and_experts_have_the_numbers_of_one_process(name):
    spec = expert_spec(DEEPSEEK, LATENT, **LATENT_LAYOUTS[name])
    every = run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True)
    assert_same(joined_stages(every), latent_alone())


@pytest.mark.slow
@pytest.mark.release  # with other attention in test_expert_layouts.py
def test_dualpipev_has_the_numbers_of_one_process():
    """It needs a microbatch for each of four stages; the loss of a sequence does not depend on their size."""
    layout = {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "schedule": "dualpipev"}
    spec = expert_spec(DEEPSEEK, {**LATENT, "batch__micro_batch_size": 1}, **layout)
    assert_same(joined_stages(run_ranks(4, on_ranks, spec, True)), latent_alone())


UNBALANCED = DEEPSEEK | {"balance_loss": "none", "balance_bias": False}


@pytest.mark.parametrize("moe", [SOFTMAX, UNBALANCED], ids=["softmax", "sigmoid"])
def test_one_rank_has_the_numbers_of_plain_torch(moe):
    hold_to_one_process(expert_spec(moe))


@pytest.fixture(scope="module")
def balanced_run(tmp_path_factory):
    """Ten steps with an expert bias that nothing stops and the load of the step before, by the trainer."""
    moe = replace(MoESpec(), **DEEPSEEK | {"balance_bias_rate": 1e-4, "balance_loss": "global"})
    beside = CheckpointSpec(interval=5, async_save=True)
    spec = replace(ten_steps(tmp_path_factory.mktemp("tokens")), checkpoint=beside)
    spec = replace(spec, model=replace(spec.model, moe=moe))
    root = tmp_path_factory.mktemp("whole")
    assert run_loop(spec, root).reason == "finished all 10 steps"
    return spec, root


def steps_of(root):
    """The lines of metrics.jsonl that describe a step."""
    return [line for line in read_lines(RunDirectory(root).metrics) if "moe_load_max" in line]


@pytest.mark.parametrize(
    "layout",
    slow_but([{"ep": 2}, {"dp": 1, "tp": 2, "sequence_parallel": True}], every=[{"ep": 2}]),
    ids=["ep2", "tp2"],
)
def test_a_resumed_run_has_the_same_expert_bias(balanced_run, tmp_path, layout):
    """Five steps under dp2, saved beside training, and five more under another layout, against ten under dp2."""
    spec, whole = balanced_run
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(RunDirectory(tmp_path / "run").checkpoint(10))
    resumed = replace(spec, parallel=replace(spec.parallel, **layout))
    assert run_loop(resumed, tmp_path / "run").reason == "finished all 10 steps"
    first, second = (read_tensors(RunDirectory(root).checkpoint(10)) for root in (whole, tmp_path / "run"))
    biases = [name for name in first if name.endswith("router.expert_bias")]
    assert biases == [f"model.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2)]
    for name in biases:
        assert first[name].dtype == torch.float32
        assert first[name].any()
        assert torch.equal(first[name], second[name])
    assert "router.layers.1.previous_load" in first
    histories = [RunDirectory(root).expert_load.read_bytes() for root in (whole, tmp_path / "run")]
    assert histories[0] == histories[1]
    found, expected = (steps_of(root) for root in (tmp_path / "run", whole))
    assert [line["step"] for line in found] == list(range(1, 11))
    for key in ("moe_balance_loss", "moe_load_max", "moe_load_entropy", "moe_router_probability"):
        for line, other in zip(found, expected, strict=True):
            assert line[key] == pytest.approx(other[key], rel=1e-4)
