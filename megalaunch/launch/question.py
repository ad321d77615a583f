"""Asking workers that do not move where they are: their stacks go to their logs, their last collectives to a file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megalaunch.launch.process import expects, is_alive, send_signal
from megalaunch.launch.ranks import Rank
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.trail import STACKS_SIGNAL, TRAIL_SIGNAL, Trail, read_trail

ANSWER_SECONDS = 10.0  # after the newest answer: on a machine with more to do than cores each takes its time
_QUESTIONS = (STACKS_SIGNAL, TRAIL_SIGNAL)


def ask(ranks: Sequence[Rank], directory: RunDirectory) -> dict[int, Trail]:
    """The trails of those that answer in time; a stopped process cannot, nor one that holds the interpreter's lock."""
    asked: dict[int, Rank] = {}
    began = time.time()
    for rank in ranks:
        if rank.process and not rank.is_stopped and all(expects(rank.process, number) for number in _QUESTIONS):
            asked[rank.progress.rank] = rank
            for number in _QUESTIONS:
                send_signal(rank.process, number)
    answers: dict[int, Trail] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and any(
        place not in answers and rank.process and is_alive(rank.process) for place, rank in asked.items()
    ):
        time.sleep(0.05)
        for place, rank in asked.items():
            trail = read_trail(directory.trail(place), rank.progress.attempt, since=began)
            if trail is not None and place not in answers:
                answers[place] = trail
                deadline = time.monotonic() + ANSWER_SECONDS
    return answers
