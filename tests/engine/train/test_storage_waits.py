"""Waits for the same file that overlap are one to the user: a checkpoint waits for the metrics before it."""

from __future__ import annotations

from launching import events_of

from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def test_two_waits_for_one_file_are_reported_once(tmp_path):
    directory, away = RunDirectory(tmp_path / "run"), tmp_path / "away"
    directory.root.mkdir()
    record = RunLogger(directory, 0, ProgressWriter(tmp_path / "progress", 0, 0), storage_timeout=60.0)
    directory.root.rename(away)
    record.left_out(1, 256)
    record.storage_fails(directory.metrics, "gone", "mount it again", 60.0)
    away.rename(directory.root)
    record.flush()
    record.storage_is_back(directory.metrics, "gone", 40.0)
    assert [event["path"] for event in events_of(directory, "storage_wait")] == [str(directory.metrics)]
    assert [event["seconds"] for event in events_of(directory, "storage_back")] == [40.0]


def test_waits_one_after_the_other_or_for_two_files_are_each_reported(tmp_path):
    directory = RunDirectory(tmp_path)
    record = RunLogger(directory, 0, ProgressWriter(tmp_path / "progress", 0, 0), storage_timeout=60.0)
    waits = ((directory.metrics, 3.0), (directory.metrics, 1.0), (directory.checkpoints, 2.0))
    for path, seconds in waits:
        record.storage_fails(path, "full", "free space there", 60.0)
        record.storage_is_back(path, "full", seconds)
    assert [(event["path"], event["seconds"]) for event in events_of(directory, "storage_back")] == [
        (str(path), seconds) for path, seconds in waits
    ]


def test_the_end_of_the_last_of_two_waits_tells_the_longer_one(tmp_path):
    directory = RunDirectory(tmp_path)
    record = RunLogger(directory, 0, ProgressWriter(tmp_path / "progress", 0, 0), storage_timeout=60.0)
    for _ in range(2):
        record.storage_fails(directory.metrics, "full", "free space there", 60.0)
    for seconds in (14.0, 11.0):
        record.storage_is_back(directory.metrics, "full", seconds)
    assert [event["seconds"] for event in events_of(directory, "storage_back")] == [14.0]
