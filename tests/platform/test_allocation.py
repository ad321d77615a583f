"""Nodes and devices of an allocation, from the variables that schedulers set."""

import pytest

from megalaunch.platform.allocation import Allocation, find_allocation
from megalaunch.platform.detect import detect_machine

SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (SLURM, Allocation("Slurm job", 2, 8)),
        ({"SLURM_NNODES": "4", "SLURM_GPUS_PER_NODE": "h100:4"}, Allocation("Slurm job", 4, 4)),
        ({"SLURM_JOB_NUM_NODES": "many"}, None),
        (POD, Allocation("Kubernetes job", 2, 8)),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, Allocation("Kubernetes job", 2, None)),
        ({"KUBERNETES_SERVICE_HOST": "1", "WORLD_SIZE": "4"}, Allocation("Kubernetes job", 4, None)),
        ({**SLURM, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Allocation("torchrun's variables", 2, 4)),
        ({"WORLD_SIZE": "8"}, None),  # not of a scheduler that this module knows
    ],
)
def test_an_allocation_is_read_from_the_environment(environ, found):
    assert find_allocation(environ) == found


def test_detection_reads_it(tmp_path):
    assert detect_machine(tmp_path, {"PATH": "", **SLURM}).allocation == Allocation("Slurm job", 2, 8)
    assert detect_machine(tmp_path, {"PATH": ""}).allocation is None
