"""The argument lists that start the agents, and their environment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from launching import tiny_spec

from megalaunch.launch.commands import agent_environment, node_commands, shown_commands

AGENT = [sys.executable, "-m", "megalaunch.engine.agent"]


def test_one_machine_needs_nothing_but_its_spec():
    spec = tiny_spec(platform__chip="cpu", launcher__max_restarts=5)
    assert node_commands(spec, Path("/r/a b/spec.yaml")) == [
        [*AGENT, "--fork", "-m", "megalaunch.engine.worker", "/r/a b/spec.yaml"]
    ]
    assert node_commands(spec, Path("s"), max_restarts=0)[0][3:] == [
        *("--max-restarts=0", "--fork", "-m", "megalaunch.engine.worker", "s")
    ]


def test_workers_are_forked_on_cpus_only():
    on_cpus, on_gpus = tiny_spec(platform__chip="cpu"), tiny_spec(platform__chip="h100")
    assert node_commands(on_cpus, Path("s"))[0][3:] == ["--fork", "-m", "megalaunch.engine.worker", "s"]
    assert node_commands(on_gpus, Path("s"))[0][3:] == ["-m", "megalaunch.engine.worker", "s"]
    assert node_commands(on_cpus, Path("s"), "another_worker")[0][3:] == ["-m", "another_worker", "s"]


def test_several_machines_meet_at_the_first():
    commands = node_commands(tiny_spec(platform__chip="h100", cluster__nodes=2), Path("spec.yaml"))
    assert commands == [
        [*AGENT, f"--node-rank={node}", "--first-node=NODE0:29400", "-m", "megalaunch.engine.worker", "spec.yaml"]
        for node in range(2)
    ]


def test_what_is_shown_can_be_pasted():
    nasty = Path("/r/$(touch x)'; rm -rf \n/spec.yaml")
    for nodes in (1, 2):
        commands = node_commands(tiny_spec(cluster__nodes=nodes), nasty)
        text = "\n".join(shown_commands(commands))
        assert [argument for command in commands for argument in command] == list(shlex.split(text, comments=True))


def test_the_cores_are_shared_and_the_users_own_value_wins():
    assert agent_environment({}, 7, workers=2, cores=9)["OMP_NUM_THREADS"] == "4"
    assert agent_environment({}, 7, workers=8, cores=2)["OMP_NUM_THREADS"] == "1"
    mine = agent_environment({"OMP_NUM_THREADS": "3", "HOME": "/h"}, 7, workers=2, cores=9)
    watched = {"MEGALAUNCH_LAUNCHER_PID": "7", "MEGALAUNCH_HANGS_WATCHED": "1"}
    assert mine == {"OMP_NUM_THREADS": "3", "HOME": "/h", **watched}
