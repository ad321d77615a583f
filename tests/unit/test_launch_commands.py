"""The argument lists that start the agents, and their environment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from launching import tiny_spec

from megalaunch.launch.commands import agent_environment, node_commands, shown_commands


def test_one_machine_picks_its_own_port():
    spec = tiny_spec(launcher__max_restarts=5)
    assert node_commands(spec, Path("/r/a b/spec.yaml")) == [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *("--local-addr=localhost", "--max-restarts=5", "-m", "megalaunch.engine.worker", "/r/a b/spec.yaml"),
        ]
    ]


def test_several_machines_meet_at_the_first():
    first, second = node_commands(tiny_spec(cluster__nodes=2), Path("spec.yaml"))
    assert first[:2] == ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    assert {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=NODE0:29400", "--rdzv-id=fake"} < set(first)
    assert set(first) ^ set(second) == {"--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"}


def test_what_is_shown_can_be_pasted():
    nasty = Path("/r/$(touch x)'; rm -rf \n/spec.yaml")
    for nodes in (1, 2):
        commands = node_commands(tiny_spec(cluster__nodes=nodes), nasty)
        text = "\n".join(shown_commands(commands))
        assert [word for command in commands for word in command] == list(shlex.split(text, comments=True))


def test_the_cores_are_shared_and_the_users_own_value_wins():
    assert agent_environment({}, 7, workers=2, cores=9)["OMP_NUM_THREADS"] == "4"
    assert agent_environment({}, 7, workers=8, cores=2)["OMP_NUM_THREADS"] == "1"
    mine = agent_environment({"OMP_NUM_THREADS": "3", "HOME": "/h"}, 7, workers=2, cores=9)
    assert mine == {"OMP_NUM_THREADS": "3", "HOME": "/h", "MEGALAUNCH_LAUNCHER_PID": "7"}
