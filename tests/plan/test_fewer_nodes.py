"""launcher.min_nodes: on which smaller numbers of nodes a run is valid, and what stays the same there."""

from __future__ import annotations

import pytest
from made_specs import resolved

from megalaunch.plan.check import check
from megalaunch.plan.fewer_nodes import smaller_node_counts
from megalaunch.plan.rules.registry import RuleContext
from megalaunch.runs.submit import _with_overrides

SSH = ("recipe=tiny", "data.corpus=x", "launcher=ssh", "launcher.ssh.hosts=[a,b,c,d]", "cluster.devices_per_node=2")
FOUR = (*SSH, "cluster.nodes=4")


def about_min_nodes(*overrides):
    """Severity, message and fixes of what the check finds at launcher.min_nodes."""
    spec, composition = resolved(*overrides)
    found = check(spec, composition.origins)
    return [(item.severity, item.message, item.fixes) for item in found if item.path == "launcher.min_nodes"]


def test_micro_batch_global_batch_and_shards_stay_on_fewer_nodes():
    spec, _ = resolved(*FOUR, "batch.global_batch_size=24", "parallel=tp2hsdp4", "launcher.min_nodes=1")
    counts = {count.nodes: count for count in smaller_node_counts(RuleContext(spec), 1)}
    assert [nodes for nodes, count in counts.items() if not count.problem] == [3, 2, 1]
    assert spec.batch.micro_batch_size == 2
    assert counts[3].values["batch.micro_batch_size"] == 2
    assert [(c.values["parallel.dp"], c.values["parallel.dp_replicate"]) for c in counts.values()] == [
        (3, 3),
        (2, 2),
        (1, 1),
    ]
    assert "batch.global_batch_size" not in counts[1].values


def test_only_values_of_the_layout_are_replaced_in_the_command():
    given = ("train", "recipe=tiny", "+cluster.nodes=4", "parallel=dp8", "parallel.dp=8", "train.steps=3")
    assert _with_overrides(given, {"cluster.nodes": 2, "parallel.dp": 4, "launcher.min_nodes": None}) == (
        *("train", "recipe=tiny", "parallel=dp8", "train.steps=3"),
        *("cluster.nodes=2", "parallel.dp=4", "launcher.min_nodes=null"),
    )


@pytest.mark.parametrize("layout", ["parallel=dp8", "parallel=hsdp2"])
def test_the_command_on_fewer_nodes_composes_to_the_spec_that_was_checked(layout):
    spec, _ = resolved(*FOUR, layout, "launcher.min_nodes=2")
    (count,) = [count for count in smaller_node_counts(RuleContext(spec), 2) if not count.problem]
    there, _ = resolved(*_with_overrides((*FOUR, layout, "launcher.min_nodes=2"), count.values))
    assert (there.cluster.nodes, there.parallel.dp) == (2, 4)
    assert there.batch == spec.batch


def test_the_check_says_on_how_many_nodes_a_run_continues():
    wrong = "not on 3: a batch of 8 is not divisible by dp 6 x micro_batch_size 1"
    message = f"after lost nodes the run continues on 2 or 1 of 4 nodes; {wrong}"
    assert about_min_nodes(*FOUR, "launcher.min_nodes=1") == [("note", message, ())]
    message, fixes = (
        f"the run cannot continue on fewer than 4 nodes: {wrong}",
        ("launcher.min_nodes=2", "launcher.min_nodes=null"),
    )
    assert about_min_nodes(*FOUR, "launcher.min_nodes=3") == [("error", message, fixes)]


REFUSED = [
    (("launcher.min_nodes=4",), "min_nodes 4 is not below the 4 nodes of the run", "launcher.min_nodes=1"),
    (
        ("launcher.min_nodes=1", "launcher.name=local"),
        "launcher=local starts a run on all its nodes alone; ssh, slurm, ray and kubernetes continue on fewer",
        "launcher.min_nodes=null",
    ),
    (
        ("launcher.min_nodes=1", "launcher.name=kubernetes", "launcher.kubernetes.kind=jobset"),
        "the controller of a jobset starts all its pods again when one is lost; those of a job go on",
        "launcher.kubernetes.kind=job",
    ),
    (
        ("launcher.min_nodes=1", "launcher.name=slurm", "launcher.max_restarts=0"),
        "the script of the job starts a run on fewer nodes by a restart",
        "launcher.max_restarts=3",
    ),
    (
        ("launcher.min_nodes=1", "parallel=hsdp2", "parallel.outer_steps=10"),
        "outer steps average as many replicas",
        "launcher.min_nodes=null",
    ),
    (
        ("launcher.min_nodes=3", "batch.global_batch_size=24", "batch.micro_batch_size=3"),
        "the run cannot continue on fewer than 4 nodes: not on 3: a batch of 24 is not divisible by dp 6 x",
        "batch.micro_batch_size=1",
    ),
]


@pytest.mark.parametrize(("more", "message", "fix"), REFUSED)
def test_a_run_that_cannot_continue_on_fewer_nodes_is_refused_with_a_proven_fix(more, message, fix):
    ((severity, found, fixes),) = about_min_nodes(*FOUR, *more)
    assert severity == "error"
    assert found.startswith(message)
    assert fix in fixes


def test_a_job_of_slurm_has_spare_nodes_only_on_all_its_nodes():
    """One node with a spare one is refused: a job ends with the node of its script."""
    spares = ("launcher.slurm.spare_nodes=1", "launcher.slurm.replace_stragglers=true", "train.straggler_interval=20")
    spec, _ = resolved(*FOUR, "launcher.name=slurm", "launcher.min_nodes=1", *spares)
    *_, one = smaller_node_counts(RuleContext(spec), 1)
    assert (one.problem, one.values["launcher.slurm.spare_nodes"]) == ("", 0)
    spec, composition = resolved(*FOUR, "launcher.name=slurm", "cluster.nodes=1", "launcher.slurm.spare_nodes=1")
    (found,) = [item for item in check(spec, composition.origins) if item.path == "launcher.slurm.spare_nodes"]
    assert (found.severity, found.fixes) == ("error", ("launcher.slurm.spare_nodes=0",))


def test_memory_is_checked_on_fewer_nodes():
    run = ("recipe=llama3_8b", "data.mock=true", "platform=h100", "cluster.nodes=2", "cluster.devices_per_node=2")
    ((severity, message, _),) = about_min_nodes(
        *run, "launcher=ssh", "launcher.ssh.hosts=[a,b]", "parallel=zero3", "launcher.min_nodes=1"
    )
    assert severity == "error"
    assert message.startswith("the run cannot continue on fewer than 2 nodes: not on 1: a rank needs ")
    assert message.endswith("[memory.fits]")
