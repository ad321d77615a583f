"""Nodes and devices of an allocation, from the variables that schedulers set."""

import pytest

from megalaunch.platform.allocation import Allocation, find_allocation
from megalaunch.platform.detect import detect_machine

BATCH = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "gpu[07-08]"}
STEP = {**BATCH, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (BATCH, Allocation("Slurm job", 2, 8, None, "gpu07")),
        (STEP, Allocation("Slurm job", 2, 8, 1, "gpu07")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "16"}, Allocation("Slurm job", 2, 8, None, "gpu07")),  # a task per device
        ({"SLURM_NNODES": "4", "SLURM_GPUS_PER_NODE": "h100:4"}, Allocation("Slurm job", 4, 4, None, None)),
        ({"SLURM_JOB_NUM_NODES": "many"}, None),
        (POD, Allocation("Kubernetes job", 2, 8, 1, "run-node-0-0.run")),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, Allocation("Kubernetes job", 2, None, 1, "run-node-0-0.run")),
        (
            {"KUBERNETES_SERVICE_HOST": "1", "WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "m"},
            Allocation("Kubernetes job", 4, None, 3, "m"),
        ),
        ({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"}, Allocation("Kubernetes job", 2, None, 1, None)),
        (
            {**STEP, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "gpu07"},
            Allocation("torchrun's variables", 2, 4, 1, "gpu07"),
        ),
        ({"WORLD_SIZE": "8"}, None),  # not of a scheduler that this module knows
    ],
)
def test_an_allocation_is_read_from_the_environment(environ, found):
    assert find_allocation(environ) == found


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[07-08,11]", "gpu07"), ("a1,b[2-3]", "a1"), ("rack[1-2]-n", "rack1-n"), ("node", "node"), ("", None)],
)
def test_the_first_host_of_a_list(hosts, first):
    found = find_allocation({"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": hosts})
    assert found.first_node == first


def test_detection_reads_it(tmp_path):
    assert detect_machine(tmp_path, {"PATH": "", **BATCH}).allocation == Allocation("Slurm job", 2, 8, None, "gpu07")
    assert detect_machine(tmp_path, {"PATH": ""}).allocation is None
