"""Which nodes of a played Ray cluster a run takes: at its start, after a failure, and when others join."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from launching import events_of, wait_until

from megalaunch.launchers.attached.node import NodeError
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.ray import cluster as ray_cluster
from megalaunch.launchers.ray import launcher, missing_nodes
from megalaunch.launchers.ray.cluster import live_nodes, request_nodes, too_few_nodes
from megalaunch.launchers.ray.node_actor import NodeActor
from megalaunch.launchers.ray.run_command import run_command
from megalaunch.launchers.ray.tasks import _exit_code
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.ray import RaySpec

_TIMEOUT = RaySpec().placement_timeout


class PlayedCluster:
    """A cluster of nodes that are all free; a placement group is the list of its nodes' ids.

    Attributes:
        live: the address of each node by its id.
        faulty: the ids of nodes that cannot start an agent.
        asked: number of nodes, ids left out, time limit, and whether nodes may still join, of each reservation.
        answers: whether requests are answered.
    """

    def __init__(self, **live: str) -> None:
        self.live, self.faulty, self.asked, self.answers = live, set(), [], True

    def without(self, left_out):
        return [id for id in self.live if id not in left_out]

    def reserve_nodes(self, job, without, seconds, may_join, given_up, say):
        self.asked.append((job.nodes, "".join(sorted(without)), seconds, may_join))
        if len(self.without(without)) < job.nodes:
            raise LauncherError("too few")
        return self.without(without)[: job.nodes]

    def request_nodes(self, job, without):
        ids = []

        def is_ready():
            if not self.answers:
                raise sys.modules["ray.exceptions"].RayError
            ids[:] = ids or self.without(without)[: job.nodes]  # Ray's answer stays, also if a node is lost
            return len(ids) == job.nodes

        return SimpleNamespace(ready=lambda: is_ready, ids=ids)

    def wait(self, refs, timeout):
        assert timeout == 0
        return [is_ready for is_ready in refs if is_ready()], []

    def start_on(self, nodes):
        failed = tuple(number for number, id in enumerate(nodes._ids) if id in self.faulty)
        if failed:
            raise NodeError("has other code", "", failed)
        return [SimpleNamespace(host=self.live[id]) for id in nodes._ids]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Returns a function that returns the nodes of a run of two, which may continue on one, on a played cluster."""
    RunDirectory(tmp_path).logs.mkdir()

    def play(cluster, fewer=None, settings=None):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=cluster.wait))
        monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=type("RayError", (Exception,), {})))
        monkeypatch.setattr(launcher, "reserve_nodes", cluster.reserve_nodes)
        monkeypatch.setattr(launcher, "live_nodes", lambda job: cluster.live)
        monkeypatch.setattr(launcher, "ids_of", list)
        monkeypatch.setattr(launcher, "too_few_nodes", lambda job, without: LauncherError("too few"))
        monkeypatch.setattr(missing_nodes, "request_nodes", cluster.request_nodes)
        monkeypatch.setattr(missing_nodes, "ids_of", lambda request: request.ids)
        for module in (launcher, missing_nodes):
            monkeypatch.setattr(module, "release_nodes", lambda group: None)
        monkeypatch.setattr(launcher._Nodes, "_start_on", lambda nodes, *_: cluster.start_on(nodes))
        job = Job("run", 2, 0, (), tmp_path, tmp_path, LauncherSpec(), fewer={1: ()} if fewer is None else fewer)
        return launcher._Nodes(job, settings or RaySpec(), "")

    return play


def hosts(nodes, attempt):
    """The hosts of an attempt."""
    return [node.host for node in nodes.start(attempt, lambda: False)]


def ask(nodes):
    """Ask for more nodes, and wait for Ray's answer."""
    nodes.ask_lost()
    wait_until(lambda: nodes._inquiry.is_idle)


def returned(nodes):
    """What the nodes that have joined are, once Ray has answered."""
    answer = nodes.returned()
    wait_until(lambda: nodes._inquiry.is_idle)
    return answer or nodes.returned()


def changes_of(folder):
    return [(event["hosts"], event["reason"]) for event in events_of(RunDirectory(folder), "nodes_changed")]


def test_only_the_start_and_the_smallest_number_wait_for_nodes_that_are_not_there(play, tmp_path):
    cluster = PlayedCluster(a="host a")
    nodes = play(cluster)
    assert [hosts(nodes, attempt) for attempt in (0, 1)] == [["host a"]] * 2
    smallest = (1, "", pytest.approx(_TIMEOUT, abs=1), True)
    start, restart = (2, "", _TIMEOUT, True), (2, "", launcher._RELEASE_SECONDS, False)
    assert cluster.asked == [start, smallest, restart, smallest]
    assert changes_of(tmp_path) == [(["host a"], "too few")]


def test_no_wait_is_longer_than_placement_timeout(play):
    cluster = PlayedCluster(a="host a")
    nodes = play(cluster, settings=RaySpec(placement_timeout=3.0))
    assert [hosts(nodes, attempt) for attempt in (0, 1)] == [["host a"]] * 2
    assert [seconds for _, _, seconds, _ in cluster.asked] == pytest.approx([3.0] * 4, abs=0.5)
    alone = PlayedCluster()
    with pytest.raises(LauncherError):
        hosts(play(alone, fewer={}, settings=RaySpec(placement_timeout=3.0)), 0)
    assert alone.asked == [(2, "", pytest.approx(3.0, abs=0.5), True)]


@pytest.mark.parametrize("seconds_until_free", [0.0, 0.5, 60.0])
def test_a_wait_for_nodes_is_told_once_and_ends_at_its_limit(tmp_path, monkeypatch, seconds_until_free):
    began, told, released = time.monotonic(), [], []

    def wait(seconds):
        time.sleep(min(seconds, 0.05))
        return time.monotonic() > began + seconds_until_free

    group = SimpleNamespace(wait=wait)
    monkeypatch.setattr(ray_cluster, "request_nodes", lambda job, without: group)
    monkeypatch.setattr(ray_cluster, "release_nodes", released.append)
    monkeypatch.setattr(ray_cluster, "too_few_nodes", lambda job, without: LauncherError("too few"))
    monkeypatch.setattr(ray_cluster, "_QUIET_SECONDS", 0.1)
    job = Job("run", 2, 8, (), tmp_path, tmp_path, LauncherSpec())

    def reserve():
        return ray_cluster.reserve_nodes(job, (), 1.0, True, lambda: False, told.append)

    if seconds_until_free < 1:
        assert reserve() is group
    else:
        with pytest.raises(LauncherError, match="too few"):
            reserve()
        assert released == [group]
    assert told == (["waiting up to 1 s: too few"] if seconds_until_free else [])
    assert time.monotonic() < began + 5


@pytest.mark.parametrize(("seconds", "address"), [(0.0, "head:6379"), (0.5, "head:6379"), (0.5, None)])
def test_a_cluster_that_does_not_answer_is_named_while_the_command_waits(monkeypatch, capsys, seconds, address):
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: time.sleep(seconds))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_QUIET_SECONDS", 0.1)
    ray_cluster.connect_to_ray(address)
    what = "for the Ray cluster at head:6379" if address else "for Ray to start on this machine"
    assert capsys.readouterr().err == (f"note: waiting {what}\n" if seconds else "")


def test_a_node_that_cannot_start_is_left_out_for_another_or_for_none(play, tmp_path):
    cluster = PlayedCluster(a="host a", b="host b", c="host c")
    cluster.faulty = {"a"}
    nodes = play(cluster)
    assert hosts(nodes, 0) == ["host b", "host c"]
    assert changes_of(tmp_path) == []
    cluster.faulty |= {"b"}
    assert hosts(nodes, 1) == ["host c"]
    assert changes_of(tmp_path) == [(["host c"], "too few")]
    cluster.faulty |= {"c"}
    with pytest.raises(NodeError):
        hosts(nodes, 2)
    notes = [event["message"] for event in events_of(RunDirectory(tmp_path), "note")]
    assert notes == ["it could not start: has other code"] * 2


def test_a_node_that_failed_the_preflight_gives_its_place_to_another_of_the_cluster(play):
    cluster = PlayedCluster(a="host a", b="host b")
    nodes = play(cluster, fewer={})
    assert hosts(nodes, 0) == ["host a", "host b"]
    assert not nodes.leave_out([0], "its disk is full")
    cluster.live["c"] = "host c"
    assert nodes.leave_out([0], "its disk is full")
    assert hosts(nodes, 1) == ["host b", "host c"]


def test_a_node_that_joins_is_taken_until_it_was_lost_again_and_again(play, tmp_path):
    cluster = PlayedCluster(a="host a", b="host b")
    nodes = play(cluster)
    hosts(nodes, 0)
    for number in range(4):
        cluster.live = {"a": "host a"}
        assert hosts(nodes, 1) == ["host a"]
        ask(nodes)
        assert returned(nodes) == ""
        cluster.live[f"b{number}"] = "host b"
        cluster.answers = False
        assert returned(nodes) == ""  # and no error
        cluster.answers = True
        ask(nodes)
        assert returned(nodes) == ("Ray has 1 more node free" if number < 3 else "")
        ask(nodes)  # without the node that was found in vain
        assert returned(nodes) == ("Ray has 1 more node free" if number < 3 else "")
        assert hosts(nodes, 2) == (["host a", "host b"] if number < 3 else ["host a"])
    alone, both = (["host a"], "too few"), (["host a", "host b"], "Ray has 1 more node free")
    assert changes_of(tmp_path) == [alone, both] * 3 + [alone]
    del cluster.live["a"]
    assert hosts(nodes, 3) == ["host b"]  # rather than none


def test_a_node_that_is_lost_while_ray_holds_it_does_not_stop_the_run(play):
    cluster = PlayedCluster(a="host a")
    nodes = play(cluster)
    hosts(nodes, 0)
    ask(nodes)
    cluster.live["b"] = "host b"
    assert nodes._missing.found() == ["b"]
    del cluster.live["b"]
    assert returned(nodes) == ""
    cluster.live["c"] = "host c"
    ask(nodes)
    assert returned(nodes) == "Ray has 1 more node free"


def test_a_cluster_that_does_not_answer_delays_no_lease(play, monkeypatch):
    """The thread that renews the leases calls both; a late answer to an attempt that has ended is given back."""
    cluster, may_answer, released = PlayedCluster(a="host a"), threading.Event(), []
    nodes = play(cluster)
    hosts(nodes, 0)
    monkeypatch.setattr(missing_nodes, "release_nodes", released.append)
    request = cluster.request_nodes

    def request_nodes(job, without):
        may_answer.wait(60)
        return request(job, without)

    monkeypatch.setattr(missing_nodes, "request_nodes", request_nodes)
    began, inquiry = time.monotonic(), nodes._inquiry
    for _ in range(3):
        nodes.ask_lost()
        assert nodes.returned() == ""
    assert hosts(nodes, 1) == ["host a"]
    assert time.monotonic() - began < 5
    assert not inquiry.is_idle
    may_answer.set()
    wait_until(lambda: inquiry.is_idle)
    assert len(released) == 1
    cluster.live["b"] = "host b"
    ask(nodes)
    assert returned(nodes) == "Ray has 1 more node free"


def test_a_request_leaves_nodes_out_by_a_label_selector_for_each(tmp_path, monkeypatch):
    requested = []
    module = SimpleNamespace(placement_group=lambda bundles, **options: requested.append((bundles, options)))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
    job = Job("run", 2, 8, (), tmp_path, tmp_path, LauncherSpec())
    for without in ({"b", "a"}, ()):
        request_nodes(job, without)
    (bundles, options), (_, all_options) = requested
    assert bundles == [{"CPU": 1.0, "GPU": 8.0}] * 2
    assert options["strategy"] == "STRICT_SPREAD"
    assert options["bundle_label_selector"] == [{"ray.io/node-id": "!in(a,b)"}] * 2
    assert all_options["bundle_label_selector"] == [{}] * 2


def test_a_lease_begins_with_the_first_beat_though_other_actors_start_late(tmp_path):
    python, marks = tmp_path / "python", tmp_path / "marks"
    python.write_text(f"#!/bin/sh\necho started >> {marks}\ncat > /dev/null\n")
    python.chmod(0o755)
    actor = NodeActor(str(python), str(tmp_path / "logs/node_0.log"))
    time.sleep(0.3)
    assert not marks.exists()
    assert actor.close() is None
    wait_until(lambda: actor.exchange(b"\n", 0) == (b"", None) and marks.exists())
    assert (actor.close(), marks.read_text()) == (0, "started\n")


def test_a_task_that_ray_could_not_run_has_the_reason_below_the_traceback(monkeypatch):
    error = type("RayError", (Exception,), {})
    text = "ray::run_command() (pid=7)\n  File ...\nFileNotFoundError: this node of Ray does not share /data\n"

    def get(done, timeout):
        raise error(text)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=error)))
    with pytest.raises(LauncherError, match="did not run task 3: FileNotFoundError: this node of Ray does not share"):
        _exit_code(None, 3)


@pytest.mark.parametrize(("cause", "raised"), [(KeyboardInterrupt("stop"), KeyboardInterrupt), (None, SystemError)])
def test_a_signal_within_ray_s_c_code_is_the_exception_of_its_handler(monkeypatch, cause, raised):
    """As CoreWorker.wait, which returned a value with an exception set: Python raises a SystemError for that."""

    def get(ref, timeout):
        raise SystemError("returned a result with an exception set") from cause

    error = type("RayError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=error)))
    with pytest.raises(raised):
        _exit_code(None, 3)


def test_a_task_ends_its_command_once_it_is_told_to(tmp_path):
    """Ray's cancellation is not used: it may run a task afterwards, and abort the command when that completes."""
    python, stop, log = tmp_path / "python", tmp_path / "stop", tmp_path / "log"
    python.write_text("#!/bin/sh\necho started\nexec sleep 600\n")
    python.chmod(0o755)
    codes = []
    arguments = (str(python), (), str(tmp_path), str(log), str(stop))
    task = threading.Thread(target=lambda: codes.append(run_command(*arguments)), daemon=True)
    task.start()
    wait_until(lambda: log.exists() and log.read_text() == "started\n")
    stop.touch()
    task.join(10)
    assert codes == [-signal.SIGTERM]
    assert run_command(*arguments) == -signal.SIGTERM  # it does not begin
    assert log.read_text() == "started\n"


def test_nodes_that_are_too_small_or_left_out_do_not_count(tmp_path, monkeypatch):
    nodes = [
        {"NodeID": name, "NodeManagerAddress": f"host {name}", "Alive": alive, "Resources": resources}
        for name, alive, resources in (
            ("a", True, {"CPU": 4.0, "GPU": 8.0}),
            ("b", True, {"CPU": 4.0, "GPU": 4.0}),
            ("c", True, {"CPU": 4.0}),
            ("d", False, {"CPU": 4.0, "GPU": 8.0}),
        )
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    job = Job("run", 2, 8, (), tmp_path, tmp_path, LauncherSpec())
    assert live_nodes(job) == {"a": "host a"}
    expected = "the Ray cluster has 3 nodes, 1 of them left out, and not 2 with 1 CPU and 8 GPU free"
    assert str(too_few_nodes(job, {"b", "d"})) == expected
