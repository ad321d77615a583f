"""The time line of a run from its events."""

from __future__ import annotations

from megalaunch.runs.report.timeline import Mark, Phase, phase_seconds, read_timeline

EVENTS = [
    {"time": 100.0, "event": "launch", "overrides": ["recipe=tiny", "train.steps=9"]},
    {"time": 110.0, "event": "phase", "phase": "training"},
    {"time": 118.0, "event": "checkpoint", "step": 4, "seconds": 0.5},
    {"time": 120.0, "event": "worker_failed", "rank": 1, "step": 5, "exception": "OSError", "message": "disk"},
    {"time": 121.0, "event": "restart", "attempt": 1, "reason": "rank 1 failed"},
    {"time": 125.0, "event": "phase", "phase": "training"},
    {"time": 135.0, "event": "phase", "phase": "saving"},
    {"time": 136.0, "event": "outcome", "exit_code": 0, "reason": "finished"},
    {"time": 200.0, "event": "launch", "overrides": []},
    {"time": 204.0, "event": "phase", "phase": "training"},
    {"time": 207.0, "event": "checkpoint", "step": 8, "seconds": 0.5},
]


def test_phases_last_until_the_next_event_that_ends_them():
    first, second = read_timeline(EVENTS)
    assert first.phases == [
        Phase("starting", 100.0, 110.0),
        Phase("training", 110.0, 120.0),
        Phase("starting", 121.0, 125.0),
        Phase("training", 125.0, 135.0),
        Phase("saving", 135.0, 136.0),
    ]
    assert (first.start, first.end, first.overrides, first.outcome) == (
        100.0, 136.0, ("recipe=tiny", "train.steps=9"), "finished",
    )  # fmt: skip
    # The second launch was killed: its phase lasts until its last event.
    assert second.phases == [Phase("starting", 200.0, 204.0), Phase("training", 204.0, 207.0)]
    assert second.outcome == "no outcome was written"
    assert phase_seconds([first, second]) == [("training", 23.0), ("starting", 18.0), ("saving", 1.0)]


def test_marks_are_the_sentences_of_the_display():
    first, second = read_timeline(EVENTS)
    assert [(mark.time, mark.kind) for mark in first.marks] == [
        (118.0, "checkpoint"), (120.0, "failure"), (121.0, "restart"),
    ]  # fmt: skip
    assert first.marks[1].message == "rank 1 failed at step 5: OSError: disk"
    assert second.marks == [Mark(207.0, "checkpoint", "checkpoint of step 8 saved (0.5 s)")]


def test_a_file_without_a_launch_has_no_timeline():
    assert read_timeline(EVENTS[1:3]) == []
    assert read_timeline([]) == []
