"""The watch over the workers of one of two nodes, by a clock of the test: when it looks, reports a hang and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from launching import events_of, run_of, running, tiny_spec, wait_until

from megalaunch.launch import node_watch
from megalaunch.launch.hang import diagnosis, rank_monitor
from megalaunch.launch.node_watch import NodeWatch
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.process import find_process, is_stopped
from megalaunch.rundir.collective_trace import Collective, CollectiveTrace, GroupTrace, write_collective_trace
from megalaunch.rundir.events import record_event
from megalaunch.rundir.progress import Progress

BOTH, NEITHER = (0, 1), ()


class WatchedNode:
    """A watch of node `number` of two; each has one rank, of whose progress files the test writes the records."""

    def __init__(self, folder, number: int, worker: subprocess.Popen, monkeypatch, **values) -> None:
        self.directory, self.number, self.worker = run_of(folder), number, worker
        self.directory.logs.mkdir(parents=True)
        self.directory.events.touch()
        self.now, self.ticks = 1000.0, 0
        self.looks: list[float] = []  # when the other rank's progress was read
        self.requests = 0  # of traces
        self.answers: dict[int, CollectiveTrace] = {}
        monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(rank_monitor, "read_progress", self._reading(rank_monitor.read_progress))
        for module in (node_watch, diagnosis):
            monkeypatch.setattr(module, "request_traces", self._request_traces)
        spec = tiny_spec(cluster__nodes=2, cluster__devices_per_node=1, **values)
        self._watch = NodeWatch(spec, self.directory, number, StorageMonitor(self.directory, 600.0))
        self._report(BOTH)

    def watch(self, seconds: float, progressing: tuple[int, ...]) -> None:
        """Poll twice a second, while these ranks make progress."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self._report(progressing)
            self._watch.poll(self.now)

    @property
    def hangs(self) -> list[int]:
        """The ranks of the hang events so far."""
        return [event["rank"] for event in events_of(self.directory, "worker_failed") if event["exception"] == "hang"]

    @property
    def is_running(self) -> bool:
        """Whether the worker of this node runs."""
        return bool(running([self.worker.pid]))

    def _report(self, ranks: tuple[int, ...]) -> None:
        self.ticks += 1
        for rank in ranks:
            record = Progress(rank, self.worker.pid, 0, f"dp{rank}", "validating", 3 + rank, self.ticks, self.now)
            self.directory.progress(rank).write_text(json.dumps(asdict(record)))

    def _reading(self, read):
        def reading(path):
            if path == self.directory.progress(1 - self.number):
                self.looks.append(self.now)
            return read(path)

        return reading

    def _request_traces(self, ranks, directory, is_known=None):
        self.requests += 1
        return self.answers

    def trace(self, rank: int) -> CollectiveTrace:
        """The trace of a rank that waits for the other one, written by it now."""
        group = GroupTrace("world", BOTH, (Collective(7, "all_reduce of [1]", True),))
        trace = CollectiveTrace(0, self.now, "x.py:1 f", True, (group,))
        write_collective_trace(self.directory.collective_trace(rank), trace)
        return trace


@pytest.fixture
def worker() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def node(tmp_path, worker, monkeypatch):
    def watched(number: int, hang_timeout: float) -> WatchedNode:
        return WatchedNode(tmp_path, number, worker, monkeypatch, launcher__hang_timeout=hang_timeout)

    return watched


def test_progress_after_a_silence_beyond_the_limit_begins_anew(node):
    one = node(1, 20.0)
    one.watch(22, NEITHER)
    assert (one.requests, one.hangs) == (1, [])  # node 0 has 30 seconds to name the hung rank
    one.watch(40, BOTH)
    one.watch(18, NEITHER)
    assert (one.requests, one.hangs, one.is_running) == (1, [], True)
    one.watch(4, NEITHER)
    assert (one.requests, one.hangs) == (2, [])


def test_any_node_names_the_hung_rank_if_no_other_has(node):
    one = node(1, 20.0)
    one.watch(49, NEITHER)
    assert one.hangs == []
    one.watch(3, NEITHER)
    assert one.hangs == [0]
    assert one.is_running  # other launchers request stacks
    one.watch(3, NEITHER)
    assert one.worker.wait(5) == -signal.SIGKILL


def test_a_node_names_its_rank_that_does_not_answer_if_the_other_waits_for_it(node):
    """Node 0 cannot see that the rank is busy in native code, and would wait for its answer."""
    one = node(1, 20.0)
    one.watch(19, NEITHER)
    one.trace(0)
    one.watch(2, NEITHER)
    assert (one.hangs, one.requests) == ([1], 1)
    (event,) = events_of(one.directory, "worker_failed")
    assert "the other ranks wait in collectives that it has not called" in event["message"]


@pytest.mark.parametrize("traced", [NEITHER, BOTH])
def test_a_rank_for_which_no_other_waits_is_not_named(node, traced):
    one = node(1, 20.0)
    one.watch(19, NEITHER)
    one.answers = {rank: one.trace(rank) for rank in traced if rank == 1}
    for rank in traced:
        one.trace(rank)
    one.watch(10, NEITHER)
    assert (one.hangs, one.requests) == ([], 1)


def test_node_0_names_the_hung_rank_at_the_limit(node):
    one = node(0, 20.0)
    one.watch(20, NEITHER)
    assert one.hangs == []
    one.watch(1, NEITHER)
    assert one.hangs == [0]


def test_a_node_ends_its_workers_once_another_has_named_the_hung_rank(node):
    one = node(1, 600.0)
    one.watch(1, BOTH)
    record_event(one.directory, "worker_failed", rank=0, exception="hang", attempt=0)
    one.watch(5, NEITHER)
    assert one.is_running  # its own ranks have made progress a moment ago
    one.watch(2, NEITHER)
    assert one.worker.wait(5) == -signal.SIGKILL
    assert one.requests == 1


def test_a_rank_of_another_node_that_makes_progress_shows_that_there_is_no_hang(node):
    one = node(0, 20.0)
    one.watch(100, (1,))
    assert (one.hangs, one.requests) == ([], 0)
    one.watch(30, NEITHER)  # the last progress is seen within 6 s, and 20 s later is the limit
    assert one.hangs == [0]


@pytest.mark.parametrize(
    ("limit", "looks"), [(600.0, [150, 300, 450]), (40.0, [10, 20, 30]), (20.0, [6, 12, 18]), (8.0, [4])]
)
def test_ranks_of_other_nodes_are_read_a_few_times_before_the_limit(node, limit, looks):
    """Each launcher reads the files of all ranks, which is heavy on a shared file system with a thousand of them."""
    one = node(1, limit)
    one.watch(3, BOTH)
    one.looks.clear()
    began = one.now
    one.watch(limit - 1, NEITHER)
    assert [now - began for now in one.looks] == pytest.approx(looks, abs=1.5)
    one.watch(2, NEITHER)
    assert one.requests == 1  # the limit is reached, and the other rank was read once more
    assert one.looks[-1] - began == pytest.approx(limit, abs=1.0)


def test_a_rank_that_is_stopped_for_a_moment_is_no_hang_while_others_make_progress(node):
    """Its limit is 12 s at once, and the other ranks may not have been read for longer."""
    one = node(1, 600.0)
    one.watch(100, (0,))
    os.kill(one.worker.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(find_process(one.worker.pid)))
    one.watch(40, (0,))
    assert (one.hangs, one.is_running) == ([], True)
    one.watch(20, NEITHER)  # seen within 6 s, and 12 s later over the limit
    assert one.hangs == [1]
