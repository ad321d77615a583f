"""The documented entry without the launcher: `--prepare-only`, then two agents by hand, for two machines."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess

import pytest
from launching import steps_of, wait_until
from training import tiny_overrides
from warm_process import MEGALAUNCH

from megalaunch.process import descendants, kill_all
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress


@pytest.fixture
def agents(tmp_path):
    """The agents of two machines, both here, started by the commands that the launcher prints."""
    overrides = tiny_overrides(tmp_path, "cluster.nodes=2", "cluster.devices_per_node=1", "launcher.max_restarts=2")
    command = [*MEGALAUNCH, "train", "--prepare-only", *overrides]
    prepared = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = [line for line in prepared.stdout.splitlines() if "megalaunch.engine.agent" in line]
    assert len(lines) == 2
    commands = [shlex.split(line.replace("NODE0:29400", f"localhost:{port}")) for line in lines]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    yield started
    for agent in started:
        left = descendants(agent.pid)
        agent.kill()
        agent.communicate()
        kill_all(left, 5)


@pytest.mark.slow
def test_two_agents_train_one_run(tmp_path, agents):
    directory = RunDirectory(tmp_path / "run")
    for agent in agents:
        output, _ = agent.communicate(timeout=120)
        assert agent.returncode == 0, output
    assert steps_of(directory) == [*range(1, 11), 10, *range(11, 21), 20]
    assert read_outcome(directory.outcome).exit_code == 0
    assert (directory.logs / "rank_1.log").exists()


@pytest.mark.slow
def test_both_agents_start_their_workers_anew(tmp_path, agents):
    directory = RunDirectory(tmp_path / "run")
    wait_until(lambda: 12 in steps_of(directory), 90)
    os.kill(read_progress(directory.progress(1)).pid, signal.SIGKILL)
    for agent in agents:
        output, _ = agent.communicate(timeout=120)
        assert agent.returncode == 0, output
    assert steps_of(directory) == [*range(1, 11), 10, *range(11, 21), 20]
