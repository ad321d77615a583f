"""Shrinking a run for a rehearsal: valid, small, at most 16 workers, and every feature of the run is still on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.config.recipes import PACKAGED
from megalaunch.plan.check import check
from megalaunch.plan.layers import list_layers
from megalaunch.plan.stages import build_stages, virtual_stages
from megalaunch.plan.world import resolved_world_size
from megalaunch.runs.rehearsal.other_layout import other_layout
from megalaunch.runs.rehearsal.phases import describe_layout
from megalaunch.runs.rehearsal.report import reduced_lines
from megalaunch.runs.rehearsal.shrink import shrink
from megalaunch.runs.rehearsal.small_layout import MAX_WORKERS, small_pipeline_layout
from megalaunch.schema import with_values

RECIPES = sorted(path.stem for path in PACKAGED.glob("*.yaml"))
NOT_CHECKED = {"data.source", "launcher.multi_node", "data.corpus_exists", "memory.fits"}
SIZES = {
    *("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.head_dim", "model.vocab_size"),
    *("model.num_attention_heads", "model.num_query_groups", "model.max_position_embeddings"),
    *("model.sliding_window", "model.sliding_window_pattern", "model.no_rope_layer_interval"),
    *("model.rope.short_factors", "model.rope.long_factors", "model.rope.original_positions"),
    *("model.moe.num_experts", "model.moe.top_k", "model.moe.num_groups", "model.moe.top_k_groups"),
    *("model.moe.ffn_hidden_size", "model.moe.shared_ffn_hidden_size", "model.moe.first_k_dense_replace"),
    *("model.mla.kv_lora_rank", "model.mla.q_lora_rank", "model.mla.qk_nope_head_dim"),
    *("model.mla.qk_rope_head_dim", "model.mla.v_head_dim", "model.moe.layer_freq"),
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.dp_replicate", "parallel.vpp"),
    *("parallel.ep", "parallel.etp"),
    *("parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage"),
    *("parallel.pipeline_layout", "parallel.hierarchical_context_parallel_sizes"),
    "parallel.microbatch_group_size_per_vp_stage",
    *("parallel.cp_comm_type", "recompute.num_layers", "recompute.cpu_offloading_num_layers"),
    *("batch.sequence_length", "batch.micro_batch_size", "batch.global_batch_size"),
    *("cluster.nodes", "cluster.devices_per_node", "cluster.node_bandwidth", "platform.chip"),
    *("schedule.decay_steps", "schedule.warmup_steps", "schedule.warmup_fraction", "schedule.wsd_decay_steps"),
    "schedule.weight_decay_incr_steps",
    *("train.steps", "train.exit_at_step", "train.validation_interval", "train.loss_chunks", "train.compile"),
    *("train.sample_prompt", "train.sample_tokens", "data.num_samples", "data.validation_tokens"),
    *("tokenizer.vocab_size", "checkpoint.interval", "checkpoint.keep_last", "checkpoint.keep_every"),
    "precision.emulate",
    *("precision.loss_scale.initial", "precision.loss_scale.constant"),
    *("checkpoint.load_pretrained", "logging.log_interval", "launcher.max_restarts", "launcher.hang_timeout"),
    *("logging.profile", "logging.profile_ranks"),
    *("launcher.step_timeout", "launcher.start_timeout"),
}
"""Lengths, counts and limits: all that a rehearsal may change. What switches a feature is not among them."""

NODE = ("recipe=llama3_8b", "cluster.devices_per_node=8")
LAYOUTS = {
    "headline": (*NODE, "parallel=tp4pp4", "cluster.nodes=2"),
    "interleaved": (*NODE, "parallel=tp2pp2vpp2cp2sp"),
    "wide": (*NODE, "parallel=tp8pp4cp2sp", "cluster.nodes=16"),
    "zbv": (*NODE, "parallel=pp4vpp2", "parallel.schedule=zbv"),
    "hsdp": (*NODE, "parallel=hsdp2zero3", "cluster.nodes=2"),
    "ulysses": (*NODE, "parallel=cp4", "parallel.cp_comm_type=a2a"),
    "both": (
        *(*NODE, "parallel=cp8", "parallel.cp_comm_type=a2a+p2p", "cluster.nodes=4"),
        "parallel.hierarchical_context_parallel_sizes=[2,4]",
    ),
    "uneven": (
        *(*NODE, "parallel=pp4"),
        *("parallel.num_layers_in_first_pipeline_stage=6", "parallel.num_layers_in_last_pipeline_stage=10"),
    ),
    "written": (*NODE, "parallel=pp4", "parallel.pipeline_layout='Et*7|(t*9|)*2t*7L'"),
    "copied_groups": (*NODE, "parallel=tp8", "model.num_query_groups=4"),
    "offloaded": (*NODE, "parallel=pp2", "recompute.cpu_offloading_num_layers=3"),
    "chunks": (*NODE, "parallel=pp2", "recompute=full", "recompute.num_layers=4", "recompute.method=block"),
}


def errors_of(spec, origins=None):
    return [f for f in check(spec, origins, "train") if f.severity == "error" and f.rule not in NOT_CHECKED]


def trained_spec(*overrides):
    spec, composition = resolved(*overrides)
    assert errors_of(spec, composition.origins) == []
    return spec


def require_valid_rehearsal(spec):
    """Every feature on, no error, few workers; and so under the other layout."""
    shrunk = shrink(spec)
    small = shrunk.spec
    assert {change.path for change in shrunk.changes} <= SIZES
    assert errors_of(small) == []
    assert resolved_world_size(small.cluster) <= MAX_WORKERS
    assert small.model.num_layers <= spec.model.num_layers
    for axis in ("tp", "pp", "cp", "ep"):
        assert (getattr(small.parallel, axis) > 1) == (getattr(spec.parallel, axis) > 1)
    assert (virtual_stages(small) > 1) == (virtual_stages(spec) > 1)
    assert small.parallel.schedule == spec.parallel.schedule
    model, was = small.model, spec.model
    assert (model.num_query_groups < model.num_attention_heads) == (was.num_query_groups < was.num_attention_heads)
    if was.moe.num_experts is not None:
        assert model.moe.top_k < model.moe.num_experts
        assert (model.moe.num_groups is None) == (was.moe.num_groups is None)
        assert {layer.experts for layer in list_layers(model)} == {layer.experts for layer in list_layers(was)}
    if was.sliding_window is not None:
        assert (model.sliding_window < small.batch.sequence_length) == (was.sliding_window < spec.batch.sequence_length)
    small = with_values(small, {"data.mock": True, "data.corpus": None, "train.sample_prompt": None})
    other = other_layout(small)
    assert errors_of(other) == []
    assert replace(other.parallel, schedule="auto") != replace(small.parallel, schedule="auto")
    assert other.batch.global_batch_size == small.batch.global_batch_size
    return small


@pytest.mark.parametrize("recipe", slow_but(RECIPES, *RECIPES[::4]))
def test_a_recipe_shrinks_to_a_valid_run_with_its_features(recipe):
    spec, _ = resolved(f"recipe={recipe}")
    require_valid_rehearsal(spec)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "headline", "zbv", "both", "written"))
def test_a_layout_shrinks_to_a_valid_run_with_its_features(layout):
    require_valid_rehearsal(trained_spec(*LAYOUTS[layout]))


def test_the_headline_keeps_its_sixteen_ranks():
    small = require_valid_rehearsal(trained_spec(*LAYOUTS["headline"]))
    p = small.parallel
    assert (p.tp, p.pp, p.dp, small.model.num_layers) == (4, 4, 1, 4)


@pytest.mark.parametrize(
    ("backend", "played"), [("flash_attn", "auto"), ("te", "auto"), ("cudnn", "auto"), ("flash", "flash")]
)
def test_attention_without_a_kernel_for_cpus_is_played_by_auto(backend, played):
    spec, _ = resolved(*NODE, "data.mock=true", f"model.attention_backend={backend}")
    assert shrink(spec).spec.model.attention_backend == played


def test_of_equal_ranks_a_few_are_played():
    p = shrink(trained_spec(*LAYOUTS["wide"])).spec.parallel
    assert (p.tp, p.pp, p.cp, p.dp) == (4, 2, 2, 1)
    p = shrink(trained_spec("recipe=llama3_8b")).spec.parallel
    assert (p.cp, p.dp) == (2, 2)
    p = shrink(trained_spec(*LAYOUTS["hsdp"])).spec.parallel
    assert (p.dp, p.dp_replicate) == (4, 2)


def test_ranks_with_other_experts_are_played():
    shrunk = shrink(trained_spec("recipe=mixtral_8x7b"))
    p = shrunk.spec.parallel
    assert (p.pp, p.dp, p.ep, p.vpp) == (4, 2, 2, 2)
    assert describe_layout(shrunk.spec) == "pp4 dp2 ep2"
    assert reduced_lines(shrunk.changes)[0].startswith("fewer equal ranks: dp 8 -> 2, ep 8 -> 2;")


def test_of_many_virtual_stages_two_are_played():
    small = require_valid_rehearsal(trained_spec(*NODE, "parallel=tp2pp2vpp8cp2sp"))
    assert (small.parallel.vpp, small.model.num_layers) == (2, 4)


def test_stages_that_differ_still_differ():
    stages = build_stages(shrink(trained_spec(*LAYOUTS["uneven"])).spec)
    assert [len(stage.layers) for stage in stages] == [1, 2, 2, 3]
    stages = build_stages(shrink(trained_spec(*LAYOUTS["written"])).spec)
    assert [len(stage.layers) for stage in stages] == [1, 2, 2, 1]


def test_a_written_layout_for_fewer_ranks_has_both_ends():
    assert small_pipeline_layout("Et|tt|tt|t|tt|tt|tt|tL", 8, 4) == "Et|tt|tt|tL"
    assert small_pipeline_layout("E|t|t|tL", 4, 2) == "E|tL"


def test_groups_that_ranks_copy_are_still_copied():
    model = shrink(trained_spec(*LAYOUTS["copied_groups"])).spec.model
    assert (model.num_attention_heads, model.num_query_groups) == (16, 4)


def test_a_vocabulary_that_is_padded_is_still_padded():
    assert shrink(trained_spec(*NODE, "parallel=tp8", "model.vocab_size=50257")).spec.model.vocab_size % 8
    assert shrink(trained_spec(*NODE, "parallel=tp8", "model.vocab_size=50304")).spec.model.vocab_size % 8 == 0


def test_the_schedule_has_the_phases_of_the_runs():
    s = shrink(trained_spec(*NODE, "schedule.shape=wsd")).spec.schedule
    assert (s.shape, s.warmup_steps, s.wsd_decay_steps, s.decay_steps) == ("wsd", 1, 2, 4)
    s = shrink(trained_spec(*NODE, "schedule.warmup_fraction=0")).spec.schedule
    assert s.warmup_steps == 0
    growth = ("weight_decay_incr_style=linear", "start_weight_decay=0", "end_weight_decay=0.1")
    s = shrink(trained_spec(*NODE, *(f"schedule.{value}" for value in growth))).spec.schedule
    assert (s.weight_decay_incr_style, s.end_weight_decay, s.weight_decay_incr_steps) == ("linear", 0.1, 4)
