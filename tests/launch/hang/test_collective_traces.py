"""Requests for traces: whose replies count, and when the wait for them ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megalaunch.launch.hang import collective_traces, rank_monitor
from megalaunch.launch.hang.collective_traces import request_traces
from megalaunch.launch.hang.diagnosis import diagnose_hang
from megalaunch.launch.hang.rank_monitor import Rank, RankMonitor
from megalaunch.process import Process
from megalaunch.rundir.collective_trace import Collective, CollectiveTrace, GroupTrace, write_collective_trace
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress

STOPPED = 101  # pid


class Clock:
    """A clock that only sleep advances; every process is alive, expects the signals, and one is stopped.

    `cores`: how many each process uses all the time.
    """

    def __init__(self, monkeypatch) -> None:
        self.now, self.cores = 5000.0, 0.0
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(collective_traces, "time", clock)
        monkeypatch.setattr(collective_traces, "expects", lambda process, number: True)
        monkeypatch.setattr(collective_traces, "cpu_seconds", lambda process: self.cores * self.now)
        monkeypatch.setattr(collective_traces, "is_alive", lambda process: True)
        monkeypatch.setattr(collective_traces, "send_signal", lambda process, number: True)
        monkeypatch.setattr(rank_monitor, "is_stopped", lambda process: process.pid == STOPPED)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def rank(number: int, progress_at: float, is_local: bool = True) -> Rank:
    progress = Progress(number, 100 + number, 0, f"dp{number}", "step", 5, 9, progress_at)
    return Rank(progress, Process(100 + number, 1) if is_local else None)


def write_trace(directory: RunDirectory, number: int, at: float, *groups: GroupTrace) -> None:
    directory.logs.mkdir(exist_ok=True)
    trace = CollectiveTrace(0, at, "plugin.py:7 check", True, groups)
    write_collective_trace(directory.collective_trace(number), trace)


@pytest.mark.parametrize(("written_at", "counts"), [(990.0, False), (1010.0, True)])
def test_a_trace_of_another_node_counts_if_its_rank_wrote_it_after_its_last_progress(
    tmp_path, clock, written_at, counts
):
    """Both times are of that node's clock, which is an hour behind. An earlier request may have left a trace."""
    directory = RunDirectory(tmp_path)
    write_trace(directory, 1, written_at)
    assert (1 in request_traces([rank(1, 1000.0, is_local=False)], directory)) == counts


@pytest.mark.parametrize(("written_at", "counts"), [(4999.0, False), (5000.0, True)])
def test_a_trace_of_this_node_counts_if_it_was_written_after_the_request(tmp_path, clock, written_at, counts):
    directory = RunDirectory(tmp_path)
    write_trace(directory, 0, written_at)
    assert (0 in request_traces([rank(0, 4000.0)], directory)) == counts


@pytest.mark.parametrize(("is_known", "seconds"), [(True, 0), (False, collective_traces.REPLY_SECONDS)])
def test_the_stacks_beside_a_stopped_rank_are_awaited_until_another_node_names_the_hung_rank(
    tmp_path, clock, is_known, seconds
):
    ranks = RankMonitor(RunDirectory(tmp_path), 2, 0)
    ranks.known = {0: rank(0, 4000.0), 1: rank(1, 4001.0)}
    began = clock.now
    assert diagnose_hang(ranks, RunDirectory(tmp_path), lambda: is_known).rank is ranks.known[1]
    assert clock.now - began == pytest.approx(seconds, abs=0.1)


def test_the_others_may_wait_for_a_rank_whose_progress_is_not_seen_here(tmp_path, clock):
    directory = RunDirectory(tmp_path)
    ranks = RankMonitor(directory, 3, 0)
    ranks.known = {0: rank(0, 4000.0), 2: rank(2, 4000.0)}
    group = GroupTrace("tp", (0, 1, 2), (Collective(7, "all_reduce [4]", waiting=True),), {"all_reduce [4]": 7})
    for number in ranks.known:
        write_trace(directory, number, clock.now, group)
    hung = diagnose_hang(ranks, directory)
    assert hung.rank is None
    assert hung.reason.startswith("rank 1: the other ranks wait in collectives that it has not called")


@pytest.mark.parametrize(("cores", "seconds"), [(0.0, 10.0), (0.1, 10.0), (0.5, 4.0), (1.0, 2.0), (64.0, 2.0)])
def test_a_busy_process_is_not_awaited_for_long(tmp_path, clock, cores, seconds):
    """It would have answered, or holds the interpreter's lock; one that gets no CPU may be slow."""
    clock.cores = cores
    began = clock.now
    assert request_traces([rank(0, 4000.0)], RunDirectory(tmp_path)) == {}
    assert clock.now - began == pytest.approx(seconds, abs=0.11)
