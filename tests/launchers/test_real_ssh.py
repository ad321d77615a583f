"""Real ssh: a run on two hosts survives its agents, resumes exactly, and leaves nothing; skipped without sshd."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster_runs import (
    LENGTH,
    STEPS,
    agents,
    call,
    detached_and_stopped,
    losses_of,
    parent_of,
    processes,
    shown,
    started,
    undisturbed_run,
)
from launching import steps_of, wait_until
from mini_ssh import mini_ssh
from training import tiny_overrides

from megalaunch.launchers.record import read_record
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

pytestmark = pytest.mark.timed
SLOW = pytest.mark.slow

_REMOTE = "megalaunch.launchers.attached.remote_agent"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with mini_ssh(tmp_path_factory.mktemp("ssh")) as overrides:
        yield overrides


def overrides_of(folder, *more):
    return tiny_overrides(folder / "run", *LENGTH, *more, shared=folder)


def on_the_hosts(run):
    """The agents and workers of a run, and the commands that started them."""
    return processes(str(run.root), "-m megalaunch")


def restarts_of(run):
    return [event["reason"] for event in read_lines(run.events) if event["event"] == "restart"]


@pytest.mark.slow
def test_killed_agents_are_started_again_with_the_losses_of_an_undisturbed_run(
    hosts, tmp_path, tmp_path_factory, record_property
):
    run = RunDirectory(tmp_path / "run/run")
    three = "launcher.ssh.hosts=[node0,node1,spare]"
    with started(tmp_path, *overrides_of(tmp_path, *hosts, three, "launcher.max_restarts=2")) as train:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 12, 120)
        (agent,) = agents(run, "--node-rank=1")
        os.kill(agent, signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda: len(restarts_of(run)) == 1, 60)
        record_property("noticed", time.monotonic() - began)
        before = len(steps_of(run))
        wait_until(lambda: len(steps_of(run)) > before, 60)
        record_property("next step", time.monotonic() - began)
        wait_until(lambda: len(steps_of(run)) > before + 12, 60)
        (command,) = [pid for pid in processes(str(run.root), "-m megalaunch train") if _rank_of(pid) == b"0"]
        os.kill(parent_of(command), signal.SIGKILL)  # what ssh started on node 0
        output, _ = train.communicate(timeout=180)
    assert train.returncode == 0, output
    assert restarts_of(run) == ["node 1 (node1) ended with exit code 5", "node 0 (node0) was lost"]
    assert "restart 2" in output
    assert "node 0 moves from node0 to the spare host spare\n" in output
    assert "RUNNING (on spare,node1, restart 2)" in output
    assert len(losses_of(run)) == STEPS
    assert losses_of(run) == losses_of(undisturbed_run(tmp_path_factory))


@pytest.mark.slow
def test_a_spare_host_trains_in_place_of_one_that_failed_the_preflight(hosts, tmp_path):
    overrides = overrides_of(tmp_path, *hosts, "launcher.ssh.hosts=[node0,no_interface,closed,node1]", "train.steps=3")
    code, output = call(tmp_path, "train", *overrides)
    assert code == 0, output
    assert "warning: the spare host closed is not reached: ssh: connect to host 127.0.0.3 port" in output
    assert "node 1 moves from no_interface to the spare host node1\n" in output
    assert "restart 1: 1 of 2 nodes failed the preflight: node 1" in output
    assert "finished all 3 steps" in output


def _rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((text.partition(b"=")[2] for text in variables if text.startswith(b"GROUP_RANK=")), None)


@pytest.mark.slow
def test_stop_saves_and_a_dead_client_leaves_nothing(hosts, tmp_path):
    run = RunDirectory(tmp_path / "run/run")
    overrides = overrides_of(tmp_path, *hosts, "train.steps=3000")
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 3, 120)
        assert "RUNNING (held by process" in shown("status", run.root)
        assert call(tmp_path, "stop", str(run.root))[0] == 0
        output, _ = train.communicate(timeout=60)
    assert train.returncode == 75, output
    saved = read_outcome(run.outcome).step
    assert run.checkpoint(saved).is_dir()
    assert on_the_hosts(run) == []
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: max(steps_of(run)) > saved + 3, 120)
        assert on_the_hosts(run)
        train.kill()
        wait_until(lambda: on_the_hosts(run) == [], 8)
    assert "ENDED" in shown("list", tmp_path)
    assert f"==> {run.node_log(1)} <==" in shown("logs", run.root)


@pytest.mark.slow
def test_a_detached_run_continues_in_the_background_until_it_is_stopped(hosts, tmp_path):
    run = RunDirectory(tmp_path / "run/run")
    overrides = overrides_of(tmp_path, *hosts, "train.steps=3000")
    output = detached_and_stopped(tmp_path, run, *overrides)
    submitted = f"submitted job {read_record(run.job).id} to ssh: 2 nodes, output in run/run/logs/node_*.log\nnext: "
    assert submitted in output
    assert on_the_hosts(run) == []
    assert "stopped by a signal; the run can be resumed" in shown("logs", run.root)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(
            "launcher.ssh.hosts=[node0,closed]",
            "node 1 (closed) is not reached: ssh: connect to host 127.0.0.3 port",
            id="closed",
        ),
        pytest.param(
            "launcher.ssh.hosts=[node0,stranger]", "node 1 (stranger) refuses the login: ", marks=SLOW, id="stranger"
        ),
        pytest.param("launcher.python=/usr/bin/absent", "has no /usr/bin/absent: ", marks=SLOW, id="no_python"),
    ],
)
def test_a_host_that_cannot_take_part_is_named(hosts, tmp_path, more, message, record_property):
    began = time.monotonic()
    code, output = call(tmp_path, "train", *overrides_of(tmp_path, *hosts, more), "--detach", seconds=60)
    record_property("end", time.monotonic() - began)
    assert code == 2, output
    assert message in output
    assert "\nfix:  " in output
    assert not RunDirectory(tmp_path / "run/run").job.exists()
