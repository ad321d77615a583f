"""Real ssh: a run whose host is lost continues on the other with the same losses, and takes the host back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster_runs import ON_FEWER, assert_losses_on_fewer, parent_of, processes, shown, started
from launching import events_of, steps_of, wait_until
from mini_ssh import mini_ssh
from training import tiny_overrides

from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.timed, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "ssh").mkdir()
    with mini_ssh(tmp_path / "ssh") as overrides:
        yield overrides


def lose_node_1(run, config):
    """Close the address of node 1 to new connections, and kill its agent; returns what opens it again."""
    text = config.read_text()
    config.write_text(text.replace("HostName 127.0.0.2", "HostName 127.0.0.3"))
    commands = processes(str(run.root), "-m megalaunch train")
    (command,) = [pid for pid in commands if b"GROUP_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(parent_of(command), signal.SIGKILL)
    return lambda: config.write_text(text)


def test_a_lost_host_is_left_out_and_taken_back_with_the_losses_of_an_undisturbed_run(
    hosts, tmp_path, tmp_path_factory
):
    run, config = RunDirectory(tmp_path / "run/run"), tmp_path / "ssh/client"
    overrides = tiny_overrides(tmp_path / "run", *ON_FEWER, *hosts, "launcher.min_nodes=1", shared=tmp_path)
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 6, 120)
        open_node_1 = lose_node_1(run, config)
        wait_until(lambda: len(events_of(run, "launch")) == 2, 60)
        status = shown("status", run.root)
        open_node_1()
        output, _ = train.communicate(timeout=300)
    assert train.returncode == 0, output
    assert "  nodes    1 of 2, on node0: node 1 (node1) is not reached: " in status
    changes = [(event["nodes"], event["hosts"]) for event in events_of(run, "nodes_changed")]
    assert changes == [(1, ["node0"]), (2, ["node0", "node1"])], output
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 1, 2]
    assert "RUNNING (1 of 2 nodes, on node0, restart 1)" in output
    assert "the run continues on all 2 nodes: node1 is back\n" in output
    assert_losses_on_fewer(run, tmp_path_factory)
