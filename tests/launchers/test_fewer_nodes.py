"""launcher.min_nodes with hosts that are played: which take part after one was lost, and when it is back."""

from __future__ import annotations

import json
import os

import pytest
from fake_ssh import UNREACHED, make_ssh, on_host, playing_hosts
from training import tiny_overrides
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.remote_agent import NodeOrder, greeting
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ssh import launcher
from megalaunch.launchers.ssh.host_list import HostList
from megalaunch.launchers.ssh.lost_hosts import LostHosts
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.ssh import SshSpec


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Returns a function that sets what ssh does."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return make_ssh(tmp_path / "bin")


def train(folder, *more):
    hosts = ("launcher=ssh", "cluster.nodes=2", "cluster.devices_per_node=1", "launcher.ssh.hosts=[a,b]")
    return CliRunner().invoke(app, ["train", *tiny_overrides(folder, *hosts, "launcher.min_nodes=1", *more)])


def told(run, name):
    """The events of a run with this name."""
    events = run.events.read_text().splitlines() if run.events.exists() else []
    return [event for event in map(json.loads, events) if event["event"] == name]


def changes_of(run):
    """How many nodes a run had after each change, and why."""
    return [(event["nodes"], event["hosts"], event["reason"]) for event in told(run, "nodes_changed")]


def test_a_host_that_is_not_reached_is_left_out(ssh, tmp_path):
    ssh(
        on_host(
            "b", UNREACHED, playing_hosts(3).replace("read order", 'read -r order; printf "%s" "$order" > order.json')
        )
    )
    done = train(tmp_path)
    run = RunDirectory(tmp_path / "run")
    assert changes_of(run) == [(1, ["a"], "node 1 (b) is not reached: connect to host: No route to host")]
    assert "FAILED (node 0 (a) ended with exit code 3, on a)" in done.stderr
    order = json.loads((tmp_path / "order.json").read_text())
    assert order["environment"]["GROUP_WORLD_SIZE"] == "1"
    assert [word for word in order["arguments"] if "nodes=" in word or "dp=" in word or "micro" in word] == [
        *("cluster.nodes=1", "parallel.dp=1", "batch.micro_batch_size=2", "launcher.min_nodes=null"),
    ]


def test_a_dry_run_prints_the_command_on_fewer_nodes(ssh, tmp_path):
    done = train(tmp_path, "--dry-run")
    *_, about, command = done.stdout.splitlines()
    assert about == "# on 1 node, after others were lost"
    assert command.startswith("megalaunch train recipe=tiny ")
    assert " cluster.nodes=2 " not in command
    assert " cluster.nodes=1 parallel.dp=1 " in command


def test_node_0_is_left_out_unless_its_address_is_set(ssh, tmp_path):
    ssh(on_host("a", UNREACHED, playing_hosts(3)))
    done = train(tmp_path, "launcher.ssh.master_addr=a")
    assert done.exit_code == 2
    assert "node 0 (a) is not reached: " in done.stderr
    train(tmp_path)
    assert [(nodes, hosts) for nodes, hosts, _ in changes_of(RunDirectory(tmp_path / "run"))] == [(1, ["b"])]


def test_a_host_that_failed_the_preflight_is_left_out_and_not_asked_again(ssh, tmp_path):
    run = RunDirectory(tmp_path / "run")
    reason = "1 of 2 nodes failed the preflight: node 1 (b): its disk is full"
    outcome = json.dumps({"exit_code": 2, "reason": reason, "step": 0, "details": {"failed_nodes": [1]}})
    first = after_start(2, f"touch failed; echo '{outcome}' > {run.outcome}")
    then = on_host("b", "touch asked; exit 255", playing_hosts(-9))
    ssh(f"if test -e failed; then {then}; else {first}; fi")
    train(tmp_path, "launcher.max_restarts=2", "launcher.restart_backoff=0.1")
    assert changes_of(run) == [(1, ["a"], reason)]
    assert [event["reason"] for event in told(run, "restart")] == [reason, "node 0 (a) ended with signal 9"]
    assert not (tmp_path / "asked").exists()


def after_start(code, action):
    """What ssh does on a host whose command does something and ends; nothing without an order."""
    *before, end = playing_hosts(code).replace("read order", "read order || exit 1").split("; ")
    return "; ".join([*before, action, end])


def saving(run, after="true"):
    """Saves a checkpoint once host b can be reached, then does something else."""
    saved = json.dumps({"time": 1.0, "event": "checkpoint", "step": 10})
    return f"touch back; echo '{saved}' >> {run.events}; {after}"


def lost_until_back(alone):
    """Host b is not reached while host a has not saved a checkpoint, alone; then both end at once."""
    return f"if test -e back; then {playing_hosts(3)}; else {on_host('b', UNREACHED, alone)}; fi"


def test_after_a_checkpoint_the_run_saves_and_takes_back_a_host_that_answers(ssh, tmp_path):
    run = RunDirectory(tmp_path / "run")
    until_stop = 'while read line; do beats=$((beats + 1)); test "$line" = stop -o $beats = 15 && break; done'
    ssh(lost_until_back(after_start(75, saving(run, until_stop))))
    done = train(tmp_path)
    assert [(nodes, hosts) for nodes, hosts, _ in changes_of(run)] == [(1, ["a"]), (2, ["a", "b"])]
    assert [event["reason"] for event in told(run, "restart")] == ["b is back"]
    assert "FAILED (node 0 (a) ended with exit code 3, on a,b, restart 1)" in done.stderr


def test_without_questions_a_host_stays_out_until_a_restart(ssh, tmp_path):
    run = RunDirectory(tmp_path / "run")
    ssh(lost_until_back(after_start(-9, saving(run, "sleep 1"))))
    train(tmp_path, "launcher.rejoin_every=0")
    assert [(nodes, hosts) for nodes, hosts, _ in changes_of(run)] == [(1, ["a"]), (2, ["a", "b"])]
    assert [event["reason"] for event in told(run, "restart")] == ["node 0 (a) ended with signal 9"]


def test_hosts_that_are_over_are_spare():
    hosts = HostList(["a", "b", "c", "d"], 4, fewer=(2, 1))
    assert hosts.leave_out([1])
    assert hosts.active == ["a", "c"]  # 3 nodes are not valid
    assert hosts.can_replace([0])
    assert hosts.replace(0) == "d"
    assert hosts.active == ["d", "c"]
    assert not hosts.grows_by(1)
    assert hosts.grows_by(2)
    hosts.add(["b", "a"])
    assert hosts.active == ["d", "c", "b", "a"]
    assert hosts.leave_out([0, 2, 3])
    assert hosts.active == ["c"]
    assert not hosts.leave_out([0])
    assert hosts.active == ["c"]


class _Answering(HeldNode):
    """A host whose agent greets at once, with some version."""

    ended = True

    def __init__(self, host, version):
        super().__init__(0, host)
        self._version = version

    def poll(self):
        self.said |= {"greeting": {**greeting(), "megalaunch": self._version}, "exit": 0}

    def end_lease(self): ...
    def wait(self):
        return True

    def failure(self):
        return self.error("is lost")

    def _write(self, data): ...


def test_a_host_that_is_lost_again_and_again_or_has_other_code_stays_out():
    asked = []

    def connect(host):
        asked.append(host)
        return _Answering(host, "other" if host == "old" else greeting()["megalaunch"])

    lost = LostHosts(connect, NodeOrder((), {}, "", "", ""))
    lost.add("old")
    for _ in range(5):
        lost.add("b")
        if not lost.take_back(1.0, lambda: False):
            break
    assert asked == ["old", "b"] * 3 + ["old"]


def test_a_host_that_is_back_is_a_spare_one_again_when_no_other_is_left(tmp_path, monkeypatch):
    RunDirectory(tmp_path).logs.mkdir()
    down = {"b"}

    def connect(hosts, attempt, given_up):
        active = hosts._hosts.active
        failed = tuple(node for node, host in enumerate(active) if host in down)
        if failed:
            raise NodeError("is not reached", "", failed)
        return list(active)

    monkeypatch.setattr(launcher._Hosts, "_connect", connect)
    version = greeting()["megalaunch"]
    monkeypatch.setattr(
        launcher._Hosts, "_ask", lambda hosts, host, log: _Answering(host, "none" if host in down else version)
    )
    job = Job("run", 2, 1, (), tmp_path, tmp_path, LauncherSpec())
    hosts = launcher._Hosts(job, SshSpec(hosts=("a", "b", "c")), "")
    assert hosts.start(0, lambda: False) == ["a", "c"]
    down.add("c")
    with pytest.raises(NodeError):
        hosts.start(1, lambda: False)
    down.remove("b")
    assert hosts.start(2, lambda: False) == ["a", "b"]
