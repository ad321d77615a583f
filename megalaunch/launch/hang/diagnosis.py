"""Diagnose a hang, or a crash within a collective: name the rank that the others waited for, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from megalaunch.launch.hang.collective_mismatch import Culprit, find_desynced_rank, find_mismatched_collective
from megalaunch.launch.hang.collective_traces import abort_location, request_traces
from megalaunch.launch.hang.rank_monitor import Rank, RankMonitor
from megalaunch.rundir.collective_trace import CollectiveTrace, read_collective_trace
from megalaunch.rundir.paths import RunDirectory


@dataclass(frozen=True)
class HungRank:
    """The rank that blocks the others; `rank` is None if none is known, `reason` is empty without evidence."""

    rank: Rank | None
    reason: str = ""


@dataclass(frozen=True)
class CollectiveCrash:
    """The rank that called another collective than its group, if any; the ranks aborted in a collective."""

    culprit: Culprit | None
    aborted: frozenset[int]


def diagnose_hang(
    ranks: RankMonitor, directory: RunDirectory, is_known: Callable[[], bool] = lambda: False
) -> HungRank:
    """Request traces from all ranks, then name the desynchronized rank or else the slowest one.

    Args:
        is_known: ends the wait for traces once it is true.
    """
    # A stopped rank is the cause, whatever the traces of the others show; `slowest` returns it.
    if any(rank.is_stopped for rank in ranks.alive):
        request_traces([rank for rank in ranks.local if not rank.ended], directory, is_known)
        return HungRank(ranks.slowest())
    culprit = find_desynced_rank(request_traces(ranks.alive, directory, is_known))
    if culprit is None:
        return HungRank(ranks.slowest())
    if culprit.rank not in ranks.known:  # only the traces of the others name it
        return HungRank(None, f"rank {culprit.rank}: {culprit.message}")
    return HungRank(ranks.known[culprit.rank], culprit.message)


def diagnose_silent_rank(
    ranks: RankMonitor, directory: RunDirectory, answers: Mapping[int, CollectiveTrace]
) -> HungRank | None:
    """Name a rank of this machine that has not answered, if all that have wait for it; None if there is none.

    It is native code that holds the interpreter's lock: other machines cannot know that it will not answer.

    Args:
        answers: the traces of the ranks of this machine, which it was asked for; those of others are read.
    """
    silent = {rank.progress.rank for rank in ranks.local if not rank.ended} - answers.keys()
    if not silent:
        return None
    traces = dict(answers)
    for number, rank in ranks.known.items():
        trace = read_collective_trace(directory.collective_trace(number), ranks.attempt, rank.progress.time)
        if rank.process is None and trace is not None:
            traces[number] = trace
    culprit = find_desynced_rank(traces)
    if culprit is None or culprit.rank not in silent:
        return None
    return HungRank(ranks.known[culprit.rank], culprit.message)


def diagnose_crash(
    ranks: RankMonitor, attempt: int, sigabrt: Collection[int], directory: RunDirectory
) -> CollectiveCrash:
    """Find a mismatched collective from the traces of a crashed attempt.

    A rank that native code aborted (in `sigabrt`) has written no trace; its stack in the log shows whether it was in a
    collective.
    """
    traces: dict[int, CollectiveTrace] = {}
    aborted: set[int] = set()
    for number, rank in ranks.known.items():
        trace = read_collective_trace(directory.collective_trace(number), attempt)
        if trace is not None:
            traces[number] = trace
        elif number in sigabrt:
            where, inside = abort_location(directory.rank_log(number))
            if inside:
                aborted.add(number)
                traces[number] = CollectiveTrace(attempt, rank.progress.time, where, inside, ())
    return CollectiveCrash(find_mismatched_collective(traces), frozenset(aborted))
