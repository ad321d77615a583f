"""Cases of the rules of a job of Slurm."""

from __future__ import annotations

from rule_cases.case import H100, TINY, Case

_JOB = (*TINY, "launcher=slurm")
_TWO_NODES = (*_JOB, "cluster.nodes=2", "cluster.devices_per_node=1")

CASES = {
    "launcher.slurm_time": Case("launcher.slurm.time=1h", "launcher.slurm.time=2-12:00", _JOB),
    "launcher.slurm_signal": Case("launcher.slurm.signal=TERM@60", "launcher.slurm.signal=USR2@60", _JOB),
    "launcher.slurm_gres": Case(
        "launcher.slurm.gres=gpu:h100:4",
        "launcher.slurm.gres=gpu:h100:8,nvme",
        (*TINY, *H100, "parallel.dp=8", "launcher=slurm"),
    ),
    "launcher.slurm_extra": Case(
        "launcher.slurm.extra=['--nodes=4']", "launcher.slurm.extra=['--mail-type=END','--spread-job']", _JOB
    ),
    "launcher.slurm_spare_nodes": Case(
        "launcher.slurm.spare_nodes=1 launcher.max_restarts=0",
        "launcher.slurm.spare_nodes=1",
        _TWO_NODES,
    ),
    "launcher.slurm_replace_stragglers": Case(
        "launcher.slurm.replace_stragglers=true",
        "launcher.slurm.replace_stragglers=true launcher.slurm.spare_nodes=1",
        (*_TWO_NODES, "train.straggler_interval=20"),
    ),
}
