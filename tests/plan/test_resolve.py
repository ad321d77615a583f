import time
from dataclasses import replace
from pathlib import Path

import pytest
from made_specs import AMX_SERVER, H100_NODE, LAPTOP, resolved
from slow_cases import slow_but

from megalaunch.config.compose import compose
from megalaunch.plan.check import check
from megalaunch.plan.resolve import derive, machine_mismatch, resolve
from megalaunch.platform.allocation import Allocation
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import with_values


def notes(*overrides, machine=LAPTOP, stored=None):
    composition = compose(overrides)
    found = resolve(composition.spec, machine, composition.choices.get("recipe"), stored).notes
    return {note.path: note for note in found}


def test_every_derived_value_is_a_note():
    found = notes("recipe=quickstart")
    assert {note.severity for note in found.values()} == {"note"}
    assert {note.rule for note in found.values()} == {"derived"}
    before, (after, _) = compose(["recipe=quickstart"]).spec, resolved("recipe=quickstart")
    changed = {
        f"{section}.{key}"
        for section in before.__dataclass_fields__
        for key in getattr(before, section).__dataclass_fields__
        if getattr(getattr(before, section), key) != getattr(getattr(after, section), key)
    }
    assert set(found) == changed
    assert found["parallel.dp"].message == "2 (world / (tp x pp x cp))"
    assert found["batch.micro_batch_size"].numbers == {"value": 4}


@pytest.mark.parametrize(("dp", "micro"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_quickstart_fits_one_to_eight_workers(dp, micro):
    spec, _ = resolved("recipe=quickstart", f"parallel.dp={dp}")
    assert (spec.cluster.devices_per_node, spec.batch.micro_batch_size) == (dp, micro)
    node = replace(H100_NODE, devices=dp)
    spec, _ = resolved("recipe=quickstart", machine=node)
    assert (spec.platform.chip, spec.parallel.dp, spec.batch.micro_batch_size) == ("h100", dp, micro)
    assert spec.precision.compute_dtype == "bf16"


def test_a_huge_batch_of_a_pipeline_is_divided_at_once():
    began = time.process_time()
    overrides = ("parallel=pp2", "parallel.vpp=2", "batch.global_batch_size=999999986")  # twice a prime
    assert resolved("recipe=quickstart", *overrides)[0].batch.micro_batch_size == 1
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("layout", "micro"),
    slow_but([("pp2", 4), ("pp4", 2), ("pp2vpp2", 2), ("pp2dp2", 2), ("pp2dp8", 1)], ("pp2", 4), ("pp2dp8", 1)),
)
def test_a_pipeline_gets_a_microbatch_for_every_stage(layout, micro):
    spec, _ = resolved("recipe=quickstart", f"parallel={layout}")
    assert spec.batch.micro_batch_size == micro


@pytest.mark.parametrize(
    ("overrides", "devices", "dp"),
    [
        (["parallel=tp2"], 2, 1),
        (["parallel=tp2", "cluster.cpu_workers=4"], 4, 2),
        (["parallel=tp2pp2"], 4, 1),
        (["parallel=tp2dp3"], 6, 3),
        (["cluster.cpu_workers=1"], 1, 1),
        (["parallel=tp2", "cluster.nodes=2"], 2, 2),
        (["parallel=tp2dp2", "cluster.nodes=2"], 2, 2),
    ],
)
def test_a_cpu_has_the_workers_that_the_layout_needs(overrides, devices, dp):
    spec, _ = resolved("recipe=tiny", *overrides)
    assert (spec.cluster.devices_per_node, spec.parallel.dp) == (devices, dp)


GRIDS = [
    (["parallel=ep4", "cluster.cpu_workers=1"], 4, 4),
    (["parallel=ep2"], 2, 2),
    (["parallel=tp2spep4", "cluster.cpu_workers=6"], 4, 2),
    (["parallel=ep2etp2"], 4, 4),
    (["parallel=pp2ep2"], 4, 2),
]


@pytest.mark.parametrize(
    ("overrides", "devices", "dp"),
    slow_but(GRIDS, GRIDS[2]),
)
def test_a_cpu_has_workers_for_both_grids(overrides, devices, dp):
    spec, _ = resolved("recipe=mixtral_tiny", *overrides)
    assert (spec.cluster.devices_per_node, spec.parallel.dp) == (devices, dp)
    assert resolved("recipe=tiny", "parallel=hsdp4")[0].parallel.dp == 4


def test_what_experts_leave_open_is_derived_for_experts_alone():
    found = notes("recipe=mixtral_tiny")
    assert found["model.moe.ffn_hidden_size"].message == "64 (model.ffn_hidden_size)"
    assert found["parallel.etp"].message == "1 (experts are not sharded)"
    assert not {"model.moe.ffn_hidden_size", "parallel.etp"} & set(notes("recipe=tiny"))
    spec, _ = resolved("recipe=deepseek_tiny")
    assert (spec.model.moe.ffn_hidden_size, spec.model.head_dim) == (32, 12)  # given; 8 + 4 of the latent head


def test_experts_under_tensor_parallelism_shard_the_sequence():
    reason = "True (tensor-parallel ranks must give experts different tokens)"
    assert notes("recipe=deepseek_tiny", "parallel=ep2tp2dp2")["parallel.sequence_parallel"].message == reason
    assert resolved("recipe=deepseek_tiny", "parallel=ep2")[0].parallel.sequence_parallel is None
    assert resolved("recipe=tiny", "parallel=tp2")[0].parallel.sequence_parallel is None
    typed = "parallel.sequence_parallel=false"
    assert resolved("recipe=deepseek_tiny", "parallel=tp2", typed)[0].parallel.sequence_parallel is False


def test_the_schedule_follows_the_stages():
    assert resolved("recipe=tiny")[0].parallel.schedule == "auto"  # no pipeline, no schedule
    assert resolved("recipe=tiny", "parallel=pp2")[0].parallel.schedule == "1f1b"
    overrides = ("recipe=tiny", "model.num_layers=4")
    assert resolved(*overrides, "parallel=pp2vpp2")[0].parallel.schedule == "interleaved"
    assert (
        resolved(*overrides, "parallel=pp2", "parallel.pipeline_layout=Et|t|t|tL")[0].parallel.schedule == "interleaved"
    )
    assert resolved(*overrides, "parallel=pp2", "parallel.schedule=gpipe")[0].parallel.schedule == "gpipe"


def test_the_embedding_starts_as_wide_as_the_rest():
    assert resolved("recipe=tiny", "model.init_std=0.01")[0].model.embedding_init_std == 0.01
    assert resolved("recipe=tiny", "model.embedding_init_std=0.5")[0].model.embedding_init_std == 0.5


def test_precision_follows_the_chip():
    assert resolved("recipe=tiny")[0].precision.compute_dtype == "fp32"
    assert resolved("recipe=tiny", machine=AMX_SERVER)[0].precision.compute_dtype == "bf16"
    assert resolved("recipe=tiny", "platform=h200")[0].precision.compute_dtype == "bf16"
    assert "AMX" in notes("recipe=tiny", machine=AMX_SERVER)["precision.compute_dtype"].message


def test_bf16_on_a_processor_without_it_is_a_warning():
    warning = notes("recipe=tiny", "precision=bf16")["precision.compute_dtype"]
    assert (warning.rule, warning.severity) == ("precision.native", "warning")
    assert "precision.compute_dtype" not in notes("recipe=tiny", "precision=bf16", machine=AMX_SERVER)
    assert "precision.compute_dtype" not in notes("recipe=tiny", "precision=bf16", "platform=h100")


ASSUMED = [
    ([], 1, 8, 4),
    (["parallel=tp4pp4"], 2, 8, 1),
    (["parallel=tp4pp4dp2"], 4, 8, 2),
    (["parallel=tp4pp3"], 3, 8, 2),  # both 12 and 8 divide 24
    (["parallel=tp2dp2"], 1, 4, 2),  # part of a node
    (["parallel=pp3"], 1, 6, 2),  # 3 whole nodes would hold 8 copies
    (["parallel=tp5pp4"], 5, 8, 2),  # 3 nodes hold 20 ranks, and 5 are filled
    (["parallel=tp3pp7"], 3, 8, None),  # 21 ranks: only 21 nodes are filled
    (["parallel=tp3pp7", "cluster.devices_per_node=7"], 3, 7, 1),
    (["parallel=tp1", "batch.global_batch_size=4"], 1, 4, 4),  # of 8, 4 divide the batch
    (["parallel=tp4pp4", "platform=gb200"], 4, 4, 1),
    (["parallel=tp4pp4", "cluster.devices_per_node=2"], 8, 2, 1),
    (["parallel=tp4pp4", "cluster.nodes=4"], 4, 8, 2),
]


@pytest.mark.parametrize(
    ("overrides", "nodes", "devices", "dp"),
    slow_but(ASSUMED, *ASSUMED[::3]),
)
def test_a_laptop_assumes_the_fewest_nodes_that_hold_the_layout(overrides, nodes, devices, dp):
    spec, _ = resolved("recipe=llama3_8b", *overrides)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node, spec.parallel.dp) == (nodes, devices, dp)


def test_a_layout_that_does_not_fill_the_nodes_that_hold_it_is_an_error_with_fixes():
    spec, composition = resolved("recipe=llama3_8b", "parallel=pp21", "model.num_layers=21")
    (error,) = [f for f in check(spec, composition.origins) if f.severity == "error"]
    assert error.message == "the world has 24 devices (3 x 8); the layout needs a multiple of 21 (pp 21)"
    assert "cluster.devices_per_node=7" in error.fixes


def test_an_assumption_is_a_note():
    found = notes("recipe=llama3_8b", "parallel=tp4pp4")
    assert found["cluster.nodes"].message == "2 (assumed: the fewest nodes of 8 h100 that hold the layout)"
    assert found["cluster.devices_per_node"].message == "8 (assumed: the usual node of h100; none is seen here)"


def test_an_assumption_leaves_room_for_the_states_of_a_large_model():
    """4 nodes hold tp 4 x pp 8, and their memory holds the sharded states of 12."""
    found = notes("recipe=gpt3_175b")
    assert found["cluster.nodes"].message == "12 (assumed: the fewest nodes of 8 h100 in whose memory the run fits)"


def test_a_chip_without_a_usual_node_stays_open():
    spec, _ = resolved("recipe=llama3_8b", "platform=h100_nvl")
    assert (spec.cluster.nodes, spec.cluster.devices_per_node, spec.parallel.dp) == ("auto", "auto", None)


SIXTEEN = replace(H100_NODE, devices=16)
TWO_OF_EIGHT = Allocation("Slurm job", 2, 8)


MACHINES = [
    (H100_NODE, 1, 8, "this machine"),
    (SIXTEEN, 1, 16, "this machine"),
    (replace(H100_NODE, allocation=TWO_OF_EIGHT), 2, 8, "from the Slurm job"),
    (replace(H100_NODE, allocation=replace(TWO_OF_EIGHT, devices_per_node=None)), 2, 8, "from the Slurm job"),
    (replace(LAPTOP, allocation=TWO_OF_EIGHT), 2, 8, "from the Slurm job"),  # a login node
]


@pytest.mark.parametrize(
    ("machine", "nodes", "devices", "why"),
    slow_but(MACHINES, *MACHINES[::2]),
)
def test_devices_come_from_the_machine_or_the_allocation(machine, nodes, devices, why):
    spec, _ = resolved("recipe=llama3_8b", machine=machine)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (nodes, devices)
    assert spec.parallel.dp == nodes * devices // 2
    assert notes("recipe=llama3_8b", machine=machine)["cluster.nodes"].message == f"{nodes} ({why})"


def test_a_given_cluster_is_neither_found_nor_assumed():
    words = ("recipe=llama3_8b", "cluster.nodes=4", "cluster.devices_per_node=4")
    spec, _ = resolved(*words, machine=replace(SIXTEEN, allocation=TWO_OF_EIGHT))
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (4, 4)


def test_names_and_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolved("recipe=tiny")[0].run.directory == str(tmp_path / "runs/tiny")
    assert resolved("recipe=tiny", "run.name=a")[0].run.directory == str(tmp_path / "runs/a")
    assert resolved("recipe=tiny", "run.directory=x/y")[0].run.directory == str(tmp_path / "x/y")
    assert resolved("recipe=tiny", "run.directory=~/z")[0].run.directory == str(Path.home() / "z")
    (tmp_path / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - tiny\n")
    assert resolved("recipe=./mine.yaml")[0].run.name == "mine"
    spec = compose(["recipe=tiny"]).spec
    assert resolve(spec, LAPTOP, None).spec.run.name == "tiny"
    assert resolve(spec, LAPTOP, "team/llama").spec.run.name == "team_llama"


def test_horizons_follow_the_steps_and_stay_as_they_began():
    first, _ = resolved("recipe=tiny", "data.corpus=x")
    assert (first.schedule.decay_steps, first.data.num_samples) == (20, 160)
    prepared = with_values(first, {"model.vocab_size": 300})
    longer, _ = resolved("recipe=tiny", "data.corpus=x", "train.steps=40", stored=prepared)
    assert (longer.train.steps, longer.schedule.decay_steps, longer.data.num_samples) == (40, 20, 160)
    assert longer.model.vocab_size == 300
    found = notes("recipe=tiny", "train.steps=40", stored=prepared)
    assert found["schedule.decay_steps"].message == "20 (from the stored run)"
    asked, _ = resolved("recipe=tiny", "schedule.decay_steps=40", stored=prepared)
    assert asked.schedule.decay_steps == 40
    elsewhere, _ = resolved("recipe=tiny", stored=first, machine=AMX_SERVER)
    assert elsewhere.precision.compute_dtype == "fp32"


def test_a_growing_weight_decay_grows_over_the_run_as_it_began():
    growth = ("schedule.weight_decay_incr_style=linear", "schedule.start_weight_decay=0", "schedule.end_weight_decay=1")
    first, _ = resolved("recipe=tiny", "data.corpus=x", *growth)
    assert first.schedule.weight_decay_incr_steps == 20
    longer, _ = resolved("recipe=tiny", "data.corpus=x", "train.steps=40", *growth, stored=first)
    assert (longer.train.steps, longer.schedule.weight_decay_incr_steps) == (40, 20)
    asked, _ = resolved("recipe=tiny", *growth, "schedule.weight_decay_incr_steps=7", stored=first)
    assert asked.schedule.weight_decay_incr_steps == 7
    assert resolved("recipe=tiny")[0].schedule.weight_decay_incr_steps is None


def test_resolving_twice_changes_nothing():
    for overrides in (["recipe=quickstart"], ["recipe=llama3_8b", "parallel=tp4pp4"]):
        spec, _ = resolved(*overrides)
        assert derive(spec) == (spec, [])
        assert resolve(spec, LAPTOP, "other").spec == spec


def test_a_machine_that_cannot_be_a_node():
    spec, _ = resolved("recipe=llama3_8b")
    (finding,) = machine_mismatch(spec, LAPTOP)
    assert (finding.rule, finding.path) == ("platform.this_machine", "platform.chip")
    assert "the run is for h100, but this machine has no accelerator (cpu)" in finding.message
    (finding,) = machine_mismatch(spec, replace(H100_NODE, devices=4))
    assert (finding.path, finding.numbers) == ("cluster.devices_per_node", {"devices_per_node": 8, "devices": 4})
    assert machine_mismatch(spec, H100_NODE) == []
    on_cpu, _ = resolved("recipe=tiny", "platform=cpu", machine=H100_NODE)
    assert on_cpu.platform.chip == "cpu"
    assert machine_mismatch(on_cpu, H100_NODE) == []
    assert CHIPS["h100"] == H100_NODE.chip


@pytest.mark.parametrize(("steps", "warmup"), [(330, 30), (12, 1), (3, 0), (3300, 297)])
def test_the_warmup_of_a_recipe_scales_with_the_run(steps, warmup):
    spec, _ = resolved("recipe=quickstart", f"train.steps={steps}")
    assert spec.schedule.warmup_steps == warmup
    assert not [f for f in check(spec) if f.severity == "error"]


def test_a_warmup_that_is_given_stays():
    spec, _ = resolved("recipe=quickstart", "train.steps=12", "schedule.warmup_steps=5")
    assert spec.schedule.warmup_steps == 5
    assert [f.rule for f in check(spec) if f.path == "schedule.warmup_fraction"] == ["schedule.warmup_twice"]
    spec, _ = resolved("recipe=quickstart", "schedule.warmup_steps=0")
    assert spec.schedule.warmup_steps == 0


@pytest.mark.parametrize(("steps", "decay"), [(100_000, 20_000), (50, 10), (8, 2)])
def test_the_final_fall_of_wsd_scales_with_the_run(steps, decay):
    spec, _ = resolved("recipe=smollm2_135m", f"train.steps={steps}")
    assert spec.schedule.wsd_decay_steps == decay
    assert not [f for f in check(spec) if f.severity == "error"]
    given, _ = resolved("recipe=smollm2_135m", f"train.steps={steps}", "schedule.wsd_decay_steps=1")
    assert given.schedule.wsd_decay_steps == 1
    other, _ = resolved("recipe=smollm2_135m", "schedule.shape=cosine")
    assert other.schedule.wsd_decay_steps is None


def test_the_warmup_goes_by_the_horizon():
    """Which is frozen when a run goes on for longer."""
    spec, _ = resolved("recipe=quickstart", "train.steps=600", "schedule.decay_steps=330")
    assert spec.schedule.warmup_steps == 30


def test_without_data_a_run_trains_on_mock_tokens_and_warns():
    spec, _ = resolved("recipe=tiny")
    assert (spec.data.mock, spec.model.vocab_size) == (True, 320)
    warning = notes("recipe=tiny")["data.corpus"]
    assert (warning.rule, warning.severity) == ("data.mock", "warning")
    assert warning.message == (
        "no training data is given, so the run trains on mock tokens; name yours: "
        "data.corpus=FILE|FOLDER|GLOB for text, data.train_prefix=PREFIX for tokens"
    )
    assert resolved("recipe=llama3_8b")[0].model.vocab_size == 128256
    for named in ("data.corpus=x", "data.sft_data=x", "data.train_prefix=x", "data.blend=[x]", "data=mock"):
        assert "data.corpus" not in notes("recipe=tiny", named)
    assert resolved("recipe=tiny", "data.train_prefix=x")[0].model.vocab_size is None
    assert resolved("recipe=tiny", "data.mock=false")[0].data.mock is False


@pytest.mark.parametrize(("rate", "lowest"), [("3e-4", 3e-5), ("1e-6", 1e-7), ("0.7", 0.07)])
def test_the_lowest_rate_follows_the_peak(rate, lowest):
    assert resolved("recipe=llama3_8b", f"optimizer.lr={rate}")[0].schedule.min_lr == lowest
    assert resolved("recipe=llama3_8b", "schedule.min_lr=0.0001")[0].schedule.min_lr == 0.0001


@pytest.mark.parametrize(("dp", "micro"), [(1, 32), (8, 32), (16, 32), (32, 16), (64, 8), (512, 1)])
def test_the_derived_micro_batch_is_within_its_limit(dp, micro):
    spec, _ = resolved("recipe=gpt2_124m", f"parallel.dp={dp}")
    assert spec.batch.micro_batch_size == micro
