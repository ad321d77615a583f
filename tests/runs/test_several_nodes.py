"""How a run starts in an allocation, and what is wrong if it cannot."""

from __future__ import annotations

import sys

import pytest
from launching import tiny_spec

from megalaunch.plan.findings import Finding
from megalaunch.platform.allocation import Allocation, NodePlace
from megalaunch.runs.several_nodes import MULTI_NODE, check_nodes, srun_command, start_of, whole_node

SECOND = NodePlace(1, "n1")
STEP = Allocation("Slurm step", 2, 8, SECOND)
JOB = Allocation("Slurm job", 2, 8, srun="/usr/bin/srun")
LOCAL = Finding(MULTI_NODE, "error", "cluster.nodes", "launcher=local")


@pytest.mark.parametrize(
    ("nodes", "allocation", "start"),
    [
        (1, None, "here"),
        (2, None, "hand"),
        (2, STEP, "node"),
        (1, STEP, "node"),  # refused: the command runs on both nodes
        (1, Allocation("Slurm step", 1, 8, SECOND), "here"),
        (2, JOB, "srun"),
        (1, JOB, "here"),
        (2, Allocation("Slurm job", 2, 8), "hand"),
        (2, Allocation("Kubernetes job", None, None, SECOND), "node"),
        (1, Allocation("Kubernetes job", None, None, SECOND), "here"),  # one run per pod
    ],
)
def test_start(nodes, allocation, start):
    assert start_of(tiny_spec(cluster__nodes=nodes), allocation) == start


@pytest.mark.parametrize(
    ("source", "min_nodes", "start"),
    [
        ("Kubernetes job", 1, "pod"),
        ("Kubernetes job", None, "node"),
        ("torchrun job", 1, "node"),  # one of the commands that a pod starts for the run
    ],
)
def test_pods_of_a_run_that_may_have_fewer_choose_those_that_take_part(source, min_nodes, start):
    spec = tiny_spec(cluster__nodes=2, launcher__name="kubernetes", launcher__min_nodes=min_nodes)
    assert start_of(spec, Allocation(source, 2, None, SECOND)) == start


@pytest.mark.parametrize(
    ("nodes", "allocation", "message", "fixes"),
    [
        (2, STEP, None, ()),
        (2, JOB, None, ()),
        (1, STEP, "the run has 1 node, but the Slurm step has 2", ("cluster.nodes=2",)),
        (4, STEP, "the run has 4 nodes, but the Slurm step has 2", ("cluster.nodes=2",)),
        (4, JOB, "the run has 4 nodes, but the Slurm job has 2", ("cluster.nodes=2",)),
        (2, Allocation("Slurm job", 4, 8, srun="srun"), None, ()),  # srun takes two of the four
        (
            2,
            Allocation("Kubernetes job", None, None, NodePlace(2, "a")),
            "this is node 2 of the Kubernetes job, but the run has only 2",
            (),
        ),
        (
            2,
            Allocation("Slurm job", 2, 8),
            "the Slurm job has 2 nodes, and srun is not found here; "
            "type: srun --nodes=2 --ntasks-per-node=1 megalaunch train 'run.name=a b'",
            (),
        ),
        (
            2,
            Allocation("torchrun job", 2, 8),
            "the torchrun job has 2 nodes, and no variable gives the rank of this one; type on every node, with "
            "its rank N: GROUP_RANK=N GROUP_WORLD_SIZE=2 MASTER_ADDR=NODE0 megalaunch train 'run.name=a b'",
            (),
        ),
        (2, Allocation("Slurm job", 1, 8), "the run has 2 nodes, but the Slurm job has 1", ("cluster.nodes=1",)),
    ],
)
def test_findings(nodes, allocation, message, fixes):
    spec = tiny_spec(cluster__nodes=nodes)
    others = [Finding("data.mock", "warning", "data", "mock")]
    start = start_of(spec, allocation)
    found = check_nodes([*others, LOCAL], start, spec, allocation, ["run.name=a b"])
    told = [finding for finding in found if finding.rule == MULTI_NODE]
    assert [finding for finding in found if finding.rule != MULTI_NODE] == others
    assert [finding.message for finding in told] == ([message] if message else [])
    assert all(finding.fixes == fixes for finding in told)


def test_srun_starts_one_launcher_per_node_with_all_that_the_job_has_there():
    command = srun_command(2, ["run.name=a b"])
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert command[-5:] == [sys.executable, "-m", "megalaunch", "train", "run.name=a b"]
    assert whole_node({"HOME": "/h", "SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_PER_TASK": "1"}) == {"HOME": "/h"}
