"""The launcher's view of failing storage: one line at each end of a wait, no hang meanwhile, no event lost."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time

import pytest
from launching import wait_until

from megalaunch.launch import storage_monitor as monitor_module
from megalaunch.launch import write_thread
from megalaunch.launch.directory import create_folders
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import Outcome
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def storage(monkeypatch):
    """A switch: `fail(errno)` or `fail(None)`."""
    real_append, real_file, state = monitor_module.append_line, monitor_module.tempfile.TemporaryFile, {"error": None}

    def checked(real):
        def call(*arguments, **options):
            if state["error"] is not None:
                raise OSError(state["error"], os.strerror(state["error"]))
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(monitor_module, "append_line", checked(real_append))
    monkeypatch.setattr(monitor_module.tempfile, "TemporaryFile", checked(real_file))
    return lambda error: state.update(error=error)


def test_one_line_at_each_end_and_no_hang_between(tmp_path, storage):
    monitor = StorageMonitor(RunDirectory(tmp_path), 600.0)
    monitor.poll(100.0)
    assert (monitor.take_lines(), monitor.excuses_silence(100.0)) == ([], False)
    storage(errno.EROFS)
    monitor.poll(100.5)  # a probe is not due
    assert not monitor.is_failing
    for second in range(101, 121):
        monitor.poll(float(second))
        assert monitor.excuses_silence(float(second))
    monitor.record("note", message="kept")
    assert monitor.take_lines() == [
        f"warning: {tmp_path} cannot be written: Read-only file system: make it writable again; "
        "the run waits 10 min 00 s for it (run.storage_timeout)"
    ]
    storage(None)
    monitor.poll(122.0)
    [line] = monitor.take_lines()
    assert line.startswith(f"{tmp_path} can be written again after ")
    assert monitor.excuses_silence(130.0)  # ranks may still be in a pause between two tries
    assert not monitor.excuses_silence(133.0)


def test_a_run_that_ends_before_the_next_probe_still_says_that_its_storage_is_back(tmp_path, storage):
    monitor = StorageMonitor(RunDirectory(tmp_path), 600.0)
    storage(errno.EROFS)
    monitor.poll(100.0)
    monitor.take_lines()
    monitor.poll_last(100.1)
    assert (monitor.take_lines(), monitor.is_failing) == ([], True)  # it is not
    storage(None)
    monitor.poll(100.2)  # not due
    assert monitor.take_lines() == []
    monitor.poll_last(100.3)
    [line] = monitor.take_lines()
    assert line.startswith(f"{tmp_path} can be written again after ")
    monitor.poll_last(100.4)
    assert monitor.take_lines() == []


def test_an_event_is_kept_until_the_storage_is_back(tmp_path, storage, monkeypatch):
    directory = RunDirectory(tmp_path)
    monitor = StorageMonitor(directory, 600.0)
    storage(errno.ENOSPC)
    monitor.record("note", message="first")
    monitor.record("note", message="second")
    storage(None)
    wait = monitor._events._wait
    monkeypatch.setattr(type(wait), "pause", 0.0)
    monitor.poll(100.0)
    assert [event["message"] for event in read_lines(directory.events)] == ["first", "second"]


def test_ranks_that_report_a_wait_that_the_launcher_sees_add_no_line(tmp_path, storage):
    monitor = StorageMonitor(RunDirectory(tmp_path), 600.0)
    own = {"event": "storage_wait", "path": "checkpoints/step_00000020", "time": monitor_module.time.time()}
    assert monitor.without_known_waits([own]) == [own]  # the launcher finds no fault: a checkpoint needs more space
    storage(errno.ENOSPC)
    monitor.poll(100.0)
    assert monitor.take_lines() == []  # it was told
    monitor.without_known_waits([{**own, "event": "storage_back", "seconds": 1.0}])
    storage(None)
    monitor.poll(102.0)
    assert monitor.take_lines() == []
    storage(errno.ENOSPC)
    monitor.poll(104.0)
    assert len(monitor.take_lines()) == 1
    other = {"event": "phase", "phase": "training"}
    assert monitor.without_known_waits([own, other]) == [other]


def test_after_the_deadline_silence_is_a_hang_again(tmp_path, storage, monkeypatch):
    monitor = StorageMonitor(RunDirectory(tmp_path), 60.0)
    storage(errno.EIO)
    monitor.poll(100.0)
    monkeypatch.setattr(monitor_module, "_ENDING_SECONDS", -60.0)
    assert not monitor.excuses_silence(101.0)


def test_a_write_that_does_not_return_blocks_nothing_and_is_recorded(tmp_path, monkeypatch):
    seconds = itertools.count(200.0)
    thawed, real_file = threading.Event(), monitor_module.tempfile.TemporaryFile

    def blocking(*arguments, **options):
        thawed.wait()
        return real_file(*arguments, **options)

    monkeypatch.setattr(monitor_module.tempfile, "TemporaryFile", blocking)
    monkeypatch.setattr(write_thread, "STALLED_SECONDS", 0.05)
    directory = RunDirectory(tmp_path)
    monitor = StorageMonitor(directory, 600.0)
    began = time.monotonic()
    monitor.poll(100.0)
    monitor.poll(102.0)
    monitor.record("note", message="kept")
    assert time.monotonic() - began < 2
    assert monitor.excuses_silence(102.0)
    assert "a write does not return: thaw it, or see whether its server answers" in monitor.take_lines()[0]
    assert not directory.events.exists()
    thawed.set()
    wait_until(lambda: monitor.poll(next(seconds)) or not monitor.is_failing)
    recorded = wait_until(lambda: (found := list(read_lines(directory.events))) and len(found) == 3 and found)
    assert [event["event"] for event in recorded] == ["storage_wait", "note", "storage_back"]
    assert recorded[0]["path"] == recorded[2]["path"] == str(tmp_path)


def test_storage_that_blocks_at_the_end_of_a_launch_is_a_reason_and_blocks_no_end(tmp_path, monkeypatch):
    thawed, real = threading.Event(), monitor_module.unwritable_reason
    monkeypatch.setattr(monitor_module, "unwritable_reason", lambda directory: thawed.wait() and real(directory))
    monkeypatch.setattr(monitor_module, "STALLED_SECONDS", 0.05)
    directory = RunDirectory(tmp_path)
    monitor = StorageMonitor(directory, 600.0)
    began = time.monotonic()
    reason = f"a folder of {tmp_path} cannot be written: a write does not return"
    assert [monitor.unwritable_reason(), monitor.unwritable_reason()] == [reason] * 2
    monitor.write_outcome(Outcome(7, "a reason", 1))
    assert time.monotonic() - began < 2
    assert not directory.outcome.exists()
    thawed.set()
    create_folders(directory)
    directory.events.touch()
    wait_until(lambda: monitor.unwritable_reason() is None)
    monitor.write_outcome(Outcome(7, "a reason", 1))
    assert directory.outcome.exists()
