"""Request traces from workers without progress: Python stacks go to their logs, their last collectives to a file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megalaunch.launch.process import expects, is_alive, send_signal
from megalaunch.launch.rank_monitor import Rank
from megalaunch.rundir.collective_trace import (
    DUMP_STACKS_SIGNAL,
    DUMP_TRACE_SIGNAL,
    CollectiveTrace,
    read_collective_trace,
)
from megalaunch.rundir.paths import RunDirectory

ANSWER_SECONDS = 10.0  # after the newest answer: with more busy processes than cores each may be slow
_QUESTIONS = (DUMP_STACKS_SIGNAL, DUMP_TRACE_SIGNAL)


def request_traces(ranks: Sequence[Rank], directory: RunDirectory) -> dict[int, CollectiveTrace]:
    """Signal the ranks, and return the traces of those that answer in time, by rank.

    A stopped process cannot answer, nor one that holds the interpreter's lock (GIL) in native code. A process without
    handlers for the two signals is left out: they would kill it.
    """
    asked: dict[int, Rank] = {}
    began = time.time()
    for rank in ranks:
        if rank.process and not rank.is_stopped and all(expects(rank.process, number) for number in _QUESTIONS):
            asked[rank.progress.rank] = rank
            for number in _QUESTIONS:
                send_signal(rank.process, number)
    answers: dict[int, CollectiveTrace] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and any(
        place not in answers and rank.process and is_alive(rank.process) for place, rank in asked.items()
    ):
        time.sleep(0.05)
        for place, rank in asked.items():
            trace = read_collective_trace(directory.collective_trace(place), rank.progress.attempt, since=began)
            if trace is not None and place not in answers:
                answers[place] = trace
                deadline = time.monotonic() + ANSWER_SECONDS
    return answers
