"""Which pods of a job a run takes, how the pod that holds it and the others know each other, and when another does."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kubernetes_jobs import job_of
from launching import events_of, wait_until
from several_nodes import free_ports

from megalaunch.launch.lock import RunLock, RunLocked
from megalaunch.launchers.attached.node import NodeError
from megalaunch.launchers.kubernetes import elastic_pod, pod_starter
from megalaunch.launchers.kubernetes.pod_channel import Host, Pod, connect, read_host, send_record, write_host
from megalaunch.launchers.kubernetes.pod_node import PodNode
from megalaunch.launchers.kubernetes.waiting_pods import WaitingPods
from megalaunch.launchers.launcher import LauncherError
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory

A, B, C = (Pod(index, f"worker-{index}", "127.0.0.1") for index in range(3))


def host(**more):
    return Host("127.0.0.1", free_ports(), "5e" * 32, **more)


def test_only_pods_with_the_secret_are_admitted_and_of_an_index_the_newest():
    here = host()
    with WaitingPods(here) as waiting, connect(here, B) as old, connect(here, A):
        wait_until(lambda: waiting.pods() == [A, B], 10)
        with pytest.raises(ConnectionResetError):
            connect(replace(here, secret="00" * 32), C)
        moved = replace(B, node="worker-9")
        with connect(here, moved):
            wait_until(lambda: waiting.pods() == [A, moved], 10)
            assert old.recv(1) == b""
        wait_until(lambda: waiting.pods() == [A], 10)
        assert waiting.take(moved) is None


def test_a_pod_takes_no_order_from_a_stranger():
    here = host()

    def pretend(listener):
        connection, _ = listener.accept()
        connection.sendall(b"00\n")
        connection.recv(4096)
        connection.sendall(b"00" * 32 + b"\n")

    with socket.create_server((here.address, here.port)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        with pytest.raises(ConnectionRefusedError, match="another program listens"):
            connect(here, A)


def test_the_secret_is_readable_by_the_user_alone(tmp_path):
    write_host(tmp_path / "host.json", host())
    assert (tmp_path / "host.json").stat().st_mode & 0o777 == 0o600


class Waiting:
    """Pods that wait, and the other end of the connection of each that was taken."""

    def __init__(self, *pods):
        self.there, self.ends = list(pods), {}

    def pods(self):
        return list(self.there)

    def take(self, pod):
        here, self.ends[pod.index] = socket.socketpair()
        here.setblocking(False)
        return here


@pytest.fixture
def started(monkeypatch):
    """The number of nodes, arguments and attempt of each start; nodes in `faulty` do not start."""
    starts = SimpleNamespace(orders=[], faulty=set())

    def start_nodes(nodes, orders, seconds, given_up):
        failed = tuple(node.node for node in nodes if node.host in starts.faulty)
        if failed:
            raise NodeError("has other software", "", failed)
        starts.orders.append((len(nodes), orders[0].arguments[-1], orders[-1].environment["MEGALAUNCH_ATTEMPT"]))
        return nodes

    monkeypatch.setattr(pod_starter, "start_nodes", start_nodes)
    for name in ("_ALL_SECONDS", "_AGAIN_SECONDS", "LEASE_SECONDS"):
        monkeypatch.setattr(pod_starter, name, 0.2)
    return starts


def starter(folder, waiting, continues=False):
    RunDirectory(folder).host_lock.write_text("{}")
    job = replace(job_of(("train", "all")), directory=folder, working_directory=folder, fewer={1: ("train", "one")})
    return pod_starter.PodStarter(job, waiting, 29400, continues, lambda: False)


def changes(folder):
    return [(event["nodes"], event["reason"]) for event in events_of(RunDirectory(folder), "nodes_changed")]


def never():
    return False


def test_a_run_starts_on_the_pods_that_are_there_and_takes_another_after_a_checkpoint(started, tmp_path):
    waiting = Waiting(B)
    pods = starter(tmp_path, waiting)
    (node,) = pods.start(0, never)
    assert str(node) == "node 0 (worker-1)"
    waiting.there = []
    pods.ask_lost()
    assert pods.returned() == ""
    waiting.there = [A]
    assert pods.returned() == "pod 0 (on worker-0) is back"
    waiting.there = [A, B]
    assert [str(node) for node in pods.start(1, never)] == ["node 0 (worker-0)", "node 1 (worker-1)"]
    waiting.there = []
    pods.ask_lost()
    assert pods.returned() == ""  # it has all
    assert started.orders == [(1, "one", "0"), (2, "all", "1")]
    assert changes(tmp_path) == [(1, "pod 0 is missing"), (2, "pod 0 (on worker-0) is back")]


def test_a_pod_is_not_looked_for_before_a_checkpoint(started, tmp_path):
    waiting = Waiting(A)
    pods = starter(tmp_path, waiting)
    pods.start(0, never)
    waiting.there = [B]
    assert pods.returned() == ""


def test_a_pod_that_was_told_to_end_is_left_out(started, tmp_path):
    waiting = Waiting(A, B)
    pods = starter(tmp_path, waiting)
    nodes = pods.start(0, never)
    send_record(waiting.ends[1], leaving=True)
    nodes[1].poll()
    assert pods.returned() == "pod 1 (on worker-1) is told to end"
    waiting.there = [A]
    pods.start(1, never)
    assert changes(tmp_path) == [(1, "pod 1 is missing")]


def test_a_node_that_failed_is_not_taken_again_but_its_pod_on_another_is(started, tmp_path):
    waiting, started.faulty = Waiting(A, B), {"worker-1"}
    pods = starter(tmp_path, waiting)
    assert len(pods.start(0, never)) == 1
    pods.ask_lost()
    waiting.there = [B]
    assert pods.returned() == ""
    waiting.there = [replace(B, node="worker-7")]
    assert pods.returned() == "pod 1 (on worker-7) is back"
    assert changes(tmp_path) == [(1, "has other software")]
    waiting.there = []
    assert not pods.leave_out([0], "")


def test_a_node_that_is_lost_again_and_again_is_not_waited_for(started, tmp_path):
    waiting = Waiting(A)
    pods = starter(tmp_path, waiting)
    for attempt in range(0, 8, 2):
        waiting.there = [A]
        pods.start(attempt, never)
        pods.ask_lost()
        waiting.there = [B]
        assert pods.returned() == ("pod 1 (on worker-1) is back" if attempt < 6 else "")
        waiting.there = [A, B]
        pods.start(attempt + 1, never)


def test_a_pod_that_takes_over_counts_as_a_restart_and_knows_the_number_of_nodes(started, tmp_path):
    starter(tmp_path, Waiting(A)).start(0, never)
    starter(tmp_path, Waiting(A), continues=True).start(0, never)
    starter(tmp_path, Waiting(A, B), continues=True).start(0, never)
    assert started.orders == [(1, "one", "0"), (1, "one", "1"), (2, "all", "1")]
    assert [nodes for nodes, _ in changes(tmp_path)] == [1, 2]


def test_too_few_pods_end_the_attempt(started, tmp_path, monkeypatch):
    monkeypatch.setattr(pod_starter, "_ENOUGH_SECONDS", 0.3)
    with pytest.raises(LauncherError, match="0 of 2 pods can take part, and the run needs 1"):
        starter(tmp_path, Waiting()).start(0, never)
    with pytest.raises(LauncherError, match="stopped before the pods started"):
        starter(tmp_path, Waiting()).start(0, lambda: True)


def test_a_pod_whose_agent_told_its_end_has_left_nothing():
    here, there = socket.socketpair()
    here.setblocking(False)
    node = PodNode(0, A, here)
    send_record(there, exit=5)
    send_record(there, agent=0)
    there.close()
    assert (node.wait(), node.ended, node.exit_code) == (True, True, 5)
    here, there = socket.socketpair()
    here.setblocking(False)
    there.close()
    assert not PodNode(0, A, here).wait()


@pytest.mark.parametrize(("code", "ends"), [(3, ExitCode.DATA), (0, ExitCode.DONE), (75, None), (5, None)])
def test_a_pod_ends_with_the_run_and_holds_it_where_its_holder_is_lost(tmp_path, monkeypatch, code, ends):
    held = []
    monkeypatch.setattr(elastic_pod._Holder, "hold", lambda self, lock: held.append(lock) or ExitCode.HANG)
    run, here, stop = RunDirectory(tmp_path), host(), SimpleNamespace(count=0, watching=False)
    job = replace(job_of(), directory=tmp_path)
    lock, result = RunLock(run.host_lock), []
    with WaitingPods(here) as waiting:
        write_host(run.host, here)
        pod = threading.Thread(target=lambda: result.append(elastic_pod.take_part(job, B, 29400, stop, print)))
        pod.start()
        wait_until(lambda: waiting.pods() == [B], 10)
        write_host(run.host, replace(read_host(run.host), exit_code=code))
    lock.release()
    pod.join(10)
    assert result == [ends if ends is not None else ExitCode.HANG]
    assert len(held) == (ends is None)
    for one in held:
        one.release()


def test_a_pod_sees_the_end_of_the_run_that_was_told_just_before_it_has_the_lock(tmp_path, monkeypatch):
    run, here, stop, freed = RunDirectory(tmp_path), host(), SimpleNamespace(count=0, watching=False), []
    write_host(run.host, here)
    waiting = WaitingPods(here)

    def take_lock(path):
        if not freed:
            raise RunLocked(path, None)
        write_host(run.host, replace(here, exit_code=0))
        return RunLock(path)

    def close():
        wait_until(lambda: waiting.pods() == [B], 10)
        freed.append(True)
        waiting.__exit__(None, None, None)

    monkeypatch.setattr(elastic_pod, "RunLock", take_lock)
    threading.Thread(target=close).start()
    job = replace(job_of(), directory=tmp_path)
    assert elastic_pod.take_part(job, B, 29400, stop, print) == ExitCode.DONE
    RunLock(run.host_lock).release()  # it is free


@pytest.mark.parametrize("code", [0, 4])
def test_the_end_of_an_earlier_job_is_not_that_of_this_one(tmp_path, monkeypatch, code):
    monkeypatch.setattr(elastic_pod._Holder, "hold", lambda self, lock: lock.release() or ExitCode.HANG)
    run, stop = RunDirectory(tmp_path), SimpleNamespace(count=0, watching=False)
    write_host(run.host, host(exit_code=code))
    job = replace(job_of(), directory=tmp_path)
    assert elastic_pod.take_part(job, B, 29400, stop, print) == ExitCode.HANG


def test_a_pod_that_was_told_to_end_while_it_waits_ends(tmp_path):
    run, here, stop = RunDirectory(tmp_path), host(), SimpleNamespace(count=0, watching=False)
    job = replace(job_of(), directory=tmp_path)
    lock, result = RunLock(run.host_lock), []
    with WaitingPods(here) as waiting:
        write_host(run.host, here)
        pod = threading.Thread(target=lambda: result.append(elastic_pod.take_part(job, B, 29400, stop, print)))
        pod.start()
        wait_until(lambda: waiting.pods() == [B], 10)
        stop.count = 1
        wait_until(lambda: waiting.pods() == [], 10)
    pod.join(10)
    lock.release()
    assert result == [ExitCode.PREEMPTED]
