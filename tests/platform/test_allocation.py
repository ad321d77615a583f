"""Nodes, devices and this node's place in an allocation, from the variables that schedulers set."""

import pytest

from megalaunch.platform.allocation import Allocation, NodePlace, find_allocation
from megalaunch.platform.detect import detect_machine

SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
BATCH = {**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = {
    **SLURM,
    "SLURM_JOB_ID": "1203",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}
INTERACTIVE = {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
KUBEFLOW = {**POD, "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-0.run", "PET_MASTER_PORT": "29500"}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5000"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
FIRST = NodePlace(1, "run-0.run", appears_late=True)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (SLURM, Allocation("Slurm job", 2, 8)),
        (BATCH, Allocation("Slurm job", 2, 8)),  # the script has a SLURM_NODEID too
        (INTERACTIVE, Allocation("Slurm job", 2, 8)),
        ({"SLURM_NNODES": "4", "SLURM_GPUS_PER_NODE": "h100:4"}, Allocation("Slurm job", 4, 4)),
        ({"SLURM_JOB_NUM_NODES": "many"}, None),
        (STEP, Allocation("Slurm step", 2, 8, NodePlace(1, "gpu07", 29806))),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, Allocation("Slurm step", 1, 8, NodePlace(1, "gpu07", 29806))),
        (
            {**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5000"},
            Allocation("Slurm step", 2, 8, NodePlace(1, "10.0.0.7", 5000)),
        ),
        (POD, Allocation("Kubernetes job", 2, 8)),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, Allocation("Kubernetes job", 2, None)),
        ({"KUBERNETES_SERVICE_HOST": "1", "WORLD_SIZE": "4"}, Allocation("Kubernetes job", 4, None)),
        (KUBEFLOW, Allocation("Kubernetes job", 2, 8, NodePlace(1, "run-0.run", 29500, appears_late=True))),
        ({**INDEXED, "WORLD_SIZE": "4"}, Allocation("Kubernetes job", 4, None, FIRST)),
        (INDEXED, Allocation("Kubernetes job", None, None, FIRST)),
        ({**SLURM, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Allocation("torchrun job", 2, 4)),
        (TORCHRUN, Allocation("torchrun job", 2, None, NodePlace(1, "10.0.0.7", 5000))),
        (
            {"NODE_RANK": "0", "NNODES": "3", "MASTER_ADDR": "a"},
            Allocation("torchrun job", 3, None, NodePlace(0, "a")),
        ),
        (SKYPILOT, Allocation("SkyPilot task", 2, 8, NodePlace(1, "10.0.0.7"))),
        (
            {**SKYPILOT, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"},
            Allocation("SkyPilot task", 2, None, NodePlace(1, "10.0.0.7")),
        ),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, None),  # the setup of a task
        ({"WORLD_SIZE": "8"}, None),  # not of a scheduler that this module knows
    ],
)
def test_an_allocation_is_read_from_the_environment(environ, found):
    assert find_allocation(environ, lambda: "run-1.run") == found


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[001-004,7],m5", "node001"),
        ("rack[1-2]n[3,5]", "rack1n3"),
        ("gpu-a[12]-ib,x", "gpu-a12-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(names, first):
    assert find_allocation({**STEP, "SLURM_STEP_NODELIST": names}).place.first_node == first


def test_a_pod_whose_name_has_another_index_has_no_known_first_pod():
    assert find_allocation(INDEXED, lambda: "debug").place is None


def test_srun_is_found_where_the_command_was_typed_once(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert find_allocation({**BATCH, **path}) == Allocation("Slurm job", 2, 8, srun=str(srun))
    assert find_allocation({**BATCH, **path, "SLURM_JOB_NUM_NODES": "1"}).srun is None
    assert find_allocation({**STEP, **path}).srun is None


def test_detection_reads_it(tmp_path):
    assert detect_machine(tmp_path, {"PATH": "", **SLURM}).allocation == Allocation("Slurm job", 2, 8)
    assert detect_machine(tmp_path, {"PATH": ""}).allocation is None
