"""Runs by ssh without a server: what goes over the connection, and what a node answers on bad input."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_ssh import UNREACHED, make_ssh, on_host, playing_hosts
from launching import events_of, tiny_spec, wait_until
from slow_cases import slow_but
from training import tiny_overrides
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launch.node import NodeAgent
from megalaunch.launchers.attached import job as attached_job
from megalaunch.launchers.attached import remote_agent
from megalaunch.launchers.attached.remote_agent import NodeOrder, greeting
from megalaunch.launchers.launcher import LauncherError
from megalaunch.launchers.record import JobRecord
from megalaunch.launchers.ssh import connection
from megalaunch.launchers.ssh.connection import Connection
from megalaunch.launchers.ssh.launcher import SshLauncher
from megalaunch.platform.allocation import NodePlace
from megalaunch.rundir.outcome import STOPPED_BETWEEN_ATTEMPTS, Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Returns a function that sets what ssh does."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return make_ssh(tmp_path / "bin")


def train(folder, *more):
    hosts = ("launcher=ssh", "cluster.nodes=2", "launcher.ssh.hosts=[me@a,b]")
    return CliRunner().invoke(app, ["train", *tiny_overrides(folder, *hosts, *more)])


def test_a_dry_run_prints_each_command_and_its_order_without_a_secret(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_TOKEN", "canary-of-a-token")  # a prefix that no machine's own variables have
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    done = train(tmp_path, "--dry-run", "launcher.ssh.environment=[CANARY_*]", "launcher.python=/opt/my python")
    assert done.exit_code == 0, done.output
    first, command, order, second, *_ = done.stdout.split("\n\n", 1)[1].splitlines()
    assert first == "# node 0: me@a, with the second line on stdin"
    assert second.startswith("# node 1: b, ")
    words = shlex.split(command)
    assert words[:3] == ["ssh", "-T", "-o"]
    assert "BatchMode=yes" in words
    assert words[-2:] == ["me@a", "'/opt/my python' -m megalaunch.launchers.attached.remote_agent"]
    row = json.loads(order)
    assert row["arguments"][:2] == ["train", "recipe=tiny"]
    assert "cluster.devices_per_node=2" in row["arguments"]  # it was open, and is what the check assumed
    assert row["environment"] == {
        "CANARY_TOKEN": "<value of CANARY_TOKEN>",
        "MEGALAUNCH_ATTEMPT": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
        "GROUP_RANK": "0",
    }
    assert "canary-of-a-token" not in done.output
    assert not (tmp_path / "run").exists()


ANSWERS = [
    ("echo me@a: Permission denied >&2; exit 255", "node 0 (me@a) refuses the login: me@a: Permission denied"),
    ("echo Host key verification failed. >&2; exit 255", "node 0 (me@a) has an unknown host key"),
    ("echo connect to host a: No route to host >&2; exit 255", "node 0 (me@a) is not reached: connect to host a"),
    ("echo sh: python: not found >&2; exit 127", "node 0 (me@a) has no /opt/python: sh: python: not found"),
    ("echo No module named megalaunch >&2; exit 1", "node 0 (me@a) has no megalaunch for /opt/python"),
    ("exit 3", "node 0 (me@a) did not start: ssh ended with code 3"),
    (
        """echo '{"greeting": {"python": "3.1", "megalaunch": "0.1.0"}}'; read order""",
        f"node 0 (me@a) has python 3.1 in place of {greeting()['python']}",
    ),
    (
        f"""echo '{json.dumps({"greeting": greeting()})}'; read order; echo '{{"refused": "is full"}}'""",
        "node 0 (me@a) is full",
    ),
]


@pytest.mark.parametrize(
    ("answer", "message"),
    slow_but(ANSWERS, *ANSWERS[::3]),
)
def test_what_a_host_answers_is_explained_with_a_fix(ssh, tmp_path, answer, message):
    ssh(answer)
    done = train(tmp_path, "launcher.python=/opt/python")
    assert done.exit_code == 2
    assert f"error: 2 of 2 nodes do not start: {message}" in done.stderr
    assert f"; {message.replace('node 0 (me@a)', 'node 1 (b)')}" in done.stderr
    assert done.stderr.count("fix:  ") == 1
    assert not RunDirectory(tmp_path / "run").job.exists()


def test_without_ssh_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = train(tmp_path)
    assert done.exit_code == 2
    assert "ssh is not found on this machine\nfix:  install the client of OpenSSH" in done.stderr


def test_a_job_of_another_machine_is_asked_for_there():
    record = JobRecord("ssh", 1, "x", 2, 0.0, "elsewhere", "")
    with pytest.raises(LauncherError, match="the job was started on elsewhere, by process 1"):
        SshLauncher().status(record)


def order_of(folder, *arguments, text="mine"):
    (folder / "job.json").write_text("mine")
    return NodeOrder(arguments, {"GROUP_RANK": "1"}, str(folder), str(folder / "job.json"), text)


def node(folder):
    """The agent of a node as a process of this machine."""
    command = [sys.executable, "-m", "megalaunch.launchers.attached.remote_agent"]
    return Connection(1, "b", command, folder / "node_1.log")


def test_a_node_tells_the_exit_code_of_its_command(tmp_path):
    there = node(tmp_path)
    there.send(order_of(tmp_path, "status", str(tmp_path / "absent")))
    wait_until(lambda: there.poll() or there.ended, 30)
    there.poll()
    assert there.said["greeting"] == greeting()
    assert there.exit_code == 2
    assert there.wait()
    assert "absent" in (tmp_path / "node_1.log").read_text()


def test_a_node_that_is_only_checked_runs_nothing(tmp_path):
    there = node(tmp_path)
    there.send(order_of(tmp_path))
    wait_until(lambda: there.poll() or there.ended, 30)
    there.poll()
    assert (there.exit_code, "started" in there.said, there.wait()) == (0, False, True)


def test_a_lease_that_ends_kills_the_command(tmp_path):
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    run.spec.write_text("{}")
    run.job.write_text("{}")
    there = node(tmp_path)
    there.send(order_of(tmp_path, "logs", "--follow", str(tmp_path)))
    wait_until(lambda: there.poll() or "started" in there.said, 30)
    pid = there.said["started"]
    assert there.wait()
    assert there.exit_code is None
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"working_directory": "/absent"}, "has no directory /absent, in which the command was typed"),
        ({"shared_file": "/absent/job.json"}, "does not share the run directory /absent"),
        ({"shared_text": "another's"}, "does not share the run directory "),
    ],
)
def test_a_host_without_the_files_of_the_run_refuses(tmp_path, monkeypatch, change, reason):
    monkeypatch.setattr(remote_agent, "_SHARE_SECONDS", 0.1)
    order = order_of(tmp_path)
    assert remote_agent._refusal(order) is None
    assert remote_agent._refusal(NodeOrder(**{**vars(order), **change})).startswith(reason)


def test_a_silent_client_ends_the_lease(monkeypatch):
    read, write = os.pipe()
    lease = remote_agent.Lease(read)
    os.write(write, b"\nstop\n\nsto")
    assert list(lease.lines(1)) == [b"stop"]
    assert not lease.ended
    monkeypatch.setattr(remote_agent, "LEASE_SECONDS", 0.0)
    assert list(lease.lines(0.01)) == []
    assert lease.ended


FAILED = [
    (5, 2, 2, 5),  # a node or its agent has crashed
    (-9, 2, 2, 5),
    (-9, 1, 2, 5),
    (5, 1, 0, 5),  # the launcher of the one node has restarted its workers already
    (3, 2, 0, 5),  # ended on purpose: a restart would end alike
]


@pytest.mark.parametrize(
    ("code", "nodes", "restarts", "exit_code"),
    slow_but(FAILED, *FAILED[::3]),
)
def test_failed_nodes_are_started_again_within_the_budget(ssh, tmp_path, code, nodes, restarts, exit_code):
    ssh(playing_hosts(code))
    budget = ("launcher.max_restarts=2", "launcher.restart_backoff=0.1", f"cluster.nodes={nodes}")
    done = train(tmp_path, *budget)
    assert done.exit_code == exit_code
    ended = "exit code" if code > 0 else "signal"
    assert f"ended without an outcome of the run: FAILED (node 0 (me@a) ended with {ended} {abs(code)}" in done.stderr
    events = RunDirectory(tmp_path / "run").events
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    assert [event["attempt"] for event in told if event["event"] == "restart"] == list(range(1, restarts + 1))


@pytest.mark.parametrize(("codes", "restarts"), [((8, 5), 0), ((5, 5), 1)])
def test_without_progress_nothing_is_started_again_whichever_node_ends_first(ssh, tmp_path, codes, restarts):
    later = playing_hosts(codes[0]).replace('; echo \'{"exit"', '; sleep 0.5; echo \'{"exit"')
    ssh(on_host("b", playing_hosts(codes[1]), later))
    assert train(tmp_path, "launcher.max_restarts=1").exit_code == 5  # no outcome was written
    events = RunDirectory(tmp_path / "run").events
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    assert len([event for event in told if event["event"] == "restart"]) == restarts


def test_an_outcome_of_an_earlier_attempt_is_not_that_of_the_job(ssh, tmp_path):
    run = RunDirectory(tmp_path / "run")
    outcome = json.dumps({"exit_code": 0, "reason": "of the first attempt", "step": 1, "details": {}})
    once = f"test -e once || echo '{outcome}' > {run.outcome}; touch once"
    ssh(playing_hosts(5).replace('; echo \'{"exit"', f'; {once}; echo \'{{"exit"'))
    done = train(tmp_path, "launcher.max_restarts=1")
    assert done.exit_code == 5
    assert "of the first attempt" not in done.stdout
    assert not run.outcome.exists()


def test_a_stop_in_the_pause_before_a_restart_ends_the_job_with_the_code_of_a_stop(ssh, tmp_path):
    run = RunDirectory(tmp_path / "run")
    failed = json.dumps({"exit_code": 5, "reason": "of the attempt that failed", "step": 1, "details": {}})
    ssh(playing_hosts(5).replace('; echo \'{"exit"', f"; echo '{failed}' > {run.outcome}; echo '{{\"exit\""))

    def stop_in_the_pause():
        wait_until(lambda: len(events_of(run, "restart")) == 2, 30)  # the first has no pause
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(stop_in_the_pause)
        done = train(tmp_path, "launcher.max_restarts=2", "launcher.restart_backoff=60")
        stopping.result()
    assert done.exit_code == 75, done.output
    assert "stopped after a failure, before the next attempt" in done.stderr
    assert read_outcome(run.outcome) == Outcome(75, STOPPED_BETWEEN_ATTEMPTS, 0)
    assert [event["exit_code"] for event in events_of(run, "outcome")] == [75]


@pytest.mark.parametrize(("variables", "expected"), [({}, False), ({"MEGALAUNCH_ATTEMPT": "0"}, True)])
def test_agents_do_not_restart_what_the_launcher_restarts(tmp_path, monkeypatch, variables, expected):
    monkeypatch.delenv("MEGALAUNCH_ATTEMPT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    agent = NodeAgent(tiny_spec(cluster__nodes=2), RunDirectory(tmp_path), NodePlace(1, "a"), 2)
    assert ("--max-restarts=0" in agent.command) == expected


def test_a_start_waits_until_the_lease_of_a_host_that_does_not_answer_is_over(ssh, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(attached_job, "_FAILED_SECONDS", 0.2)
    monkeypatch.setattr(attached_job, "LEASE_SECONDS", 0.3)
    silent = playing_hosts(5).rpartition(";")[0]
    ssh(f'case "$*" in *" b "*) {silent}; exec sleep 30;; esac; {playing_hosts(5)}')
    assert train(tmp_path, "launcher.max_restarts=1").exit_code == 5
    run = RunDirectory(tmp_path / "run")
    told = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [event["pause_seconds"] for event in told if event["event"] == "restart"] == [0.3]


_THREE = "launcher.ssh.hosts=[me@a,b,c]"


def moves_of(run):
    """Which nodes moved to which hosts, and why."""
    events = run.events.read_text().splitlines() if run.events.exists() else []
    told = [json.loads(line) for line in events]
    return [event["message"] for event in told if event["event"] == "note"]


def test_a_spare_host_takes_the_place_of_one_that_is_not_reached(ssh, tmp_path):
    ssh(on_host("b", UNREACHED, playing_hosts(3)))
    done = train(tmp_path, _THREE)
    run = RunDirectory(tmp_path / "run")
    reason = "node 1 (b) is not reached: connect to host: No route to host"
    assert moves_of(run) == ["node 1 moves from b to the spare host c", f"it could not start: {reason}"]
    assert "FAILED (node 0 (me@a) ended with exit code 3, on me@a,c)" in done.stderr


def test_all_hosts_that_fail_are_named_in_their_order_and_replaced_together(ssh, tmp_path):
    slow = f"sleep 0.5; {UNREACHED}"
    ssh(on_host("me@a", slow, on_host("b", "echo Permission denied >&2; exit 255", playing_hosts(3))))
    done = train(tmp_path)
    assert done.exit_code == 2
    assert (
        "error: 2 of 2 nodes do not start: node 0 (me@a) is not reached: connect to host: No route to host; "
        "node 1 (b) refuses the login: Permission denied\nfix:  check its name in launcher.ssh.hosts, and its address "
        "and port in the configuration of ssh; `ssh b true` must work without a question"
    ) in done.stderr
    train(tmp_path, "launcher.ssh.hosts=[me@a,b,c,d]")
    moves = ["node 0 moves from me@a to the spare host c", "node 1 moves from b to the spare host d"]
    assert moves_of(RunDirectory(tmp_path / "run"))[:2] == moves


@pytest.mark.parametrize(("hosts", "address"), [("[me@a,b]", ""), ("[me@a,b,c]", "launcher.ssh.master_addr=a")])
def test_without_a_host_that_fits_the_node_is_named(ssh, tmp_path, hosts, address):
    ssh(on_host("me@a" if address else "b", UNREACHED, playing_hosts(3)))
    done = train(tmp_path, f"launcher.ssh.hosts={hosts}", *filter(None, [address]))
    assert done.exit_code == 2
    assert "is not reached: connect to host: No route to host\nfix:  " in done.stderr
    assert moves_of(RunDirectory(tmp_path / "run")) == []


@pytest.mark.parametrize(("hosts", "exit_code", "attempts"), [("[me@a,b,c]", 5, 1), ("[me@a,b]", 2, 0)])
def test_a_spare_host_takes_the_place_of_one_that_failed_the_preflight(ssh, tmp_path, hosts, exit_code, attempts):
    run = RunDirectory(tmp_path / "run")
    reason = "1 of 2 nodes failed the preflight: node 1 (b): its disk is full"
    outcome = json.dumps({"exit_code": 2, "reason": reason, "step": 0, "details": {"failed_nodes": [1]}})
    first, second = (playing_hosts(code) for code in (2, 3))
    first = first.replace('; echo \'{"exit"', f"; echo '{outcome}' > {run.outcome}; echo '{{\"exit\"")
    marking = first.replace("read order", "read order; touch marker")
    ssh(f"if test -e marker; then {second}; else {on_host('b', marking, first)}; fi")
    done = train(tmp_path, f"launcher.ssh.hosts={hosts}")
    assert done.exit_code == exit_code
    assert moves_of(run) == ["node 1 moves from b to the spare host c"] * attempts
    told = [json.loads(line) for line in run.events.read_text().splitlines()] if attempts else []
    assert [event["reason"] for event in told if event["event"] == "restart"] == [reason] * attempts


@pytest.mark.slow
def test_a_spare_host_that_could_take_no_part_is_named_at_the_start_and_comes_last(ssh, tmp_path, monkeypatch):
    monkeypatch.setattr(attached_job, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(attached_job, "_FAILED_SECONDS", 0.2)
    run = RunDirectory(tmp_path / "run")
    refusing = playing_hosts(3).replace('{"exit": 0}', '{"refused": "does not share the run directory"}')
    *started, _ = playing_hosts(5).split("; ")
    told = " && ".join(f"grep -qs 'warning: the spare host {host}' {run.events}" for host in "cd")
    lost = "; ".join([*started, f"until {told}", "do sleep 0.05", "done", "exit 1"])
    trains = "; ".join([*started, "cat > /dev/null"])  # until its lease ends
    spares = on_host("c", UNREACHED, on_host("d", refusing, playing_hosts(5)))
    ssh(on_host("me@a", trains, on_host("b", lost, spares)))
    train(tmp_path, "launcher.ssh.hosts=[me@a,b,c,d,e]", "launcher.max_restarts=1")
    *warnings, moved = moves_of(run)[:3]
    unreached = "check its name in launcher.ssh.hosts, and its address and port in the configuration of ssh"
    unshared = "type the command in a directory, and with a run.directory, that all hosts share"
    assert set(warnings) == {
        f"warning: the spare host c is not reached: connect to host: No route to host: {unreached}",
        f"warning: the spare host d does not share the run directory: {unshared}",
    }
    assert moved.endswith("to the spare host e")


def test_a_dry_run_names_the_spare_hosts(ssh, tmp_path):
    assert train(tmp_path, _THREE, "--dry-run").stdout.endswith("\n# spare hosts: c\n")


SLOW_DEVICE = {"event": "straggler", "step": 60, "cause": "compute", "ranks": [1], "nodes": [1]}
SLOW_LINKS = {"event": "network", "nodes": 2, "slow_nodes": [1]}


@pytest.mark.parametrize(
    ("hosts", "event", "reason"),
    [
        ("[me@a,b,c]", SLOW_DEVICE, "node 1 (b) computed slower than the others"),
        ("[me@a,b,c]", SLOW_LINKS, "node 1 (b) had slower links than the others"),
        ("[me@a,b]", SLOW_DEVICE, None),
    ],
)
def test_a_spare_host_takes_the_place_of_a_slow_node(ssh, tmp_path, hosts, event, reason):
    run = RunDirectory(tmp_path / "run")
    slow = json.dumps({"time": 1.0, **event})
    greet, order, started, _ = playing_hosts(0).split("; ")
    stopped = 'while read line; do test "$line" = stop && break; done; echo \'{"exit": 75}\''
    first = f"{greet}; {order}; touch marker; {started}; echo '{slow}' >> {run.events}; {stopped}"
    ssh(f"if test -e marker; then {playing_hosts(5)}; else {first}; fi")
    more = ("launcher.ssh.replace_stragglers=true", "train.straggler_interval=20", "launcher.max_restarts=1")
    if reason:
        train(tmp_path, f"launcher.ssh.hosts={hosts}", *more)
        assert moves_of(run) == ["node 1 moves from b to the spare host c"]
        told = [json.loads(line) for line in run.events.read_text().splitlines()]
        assert reason in [event.get("reason") for event in told]
    else:
        done = train(tmp_path, f"launcher.ssh.hosts={hosts}", *more)
        assert done.exit_code == 2
        assert "launcher.ssh.hosts has no spare host: 2 for 2" in done.stderr
