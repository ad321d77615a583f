"""A worker before torch: what it refuses, how it hears signals, and that a crash is told as it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megalaunch.engine import hang_dump, worker, worker_setup
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.collective_trace import frame_location
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megalaunch.engine.worker", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [(), ("one", "two")])
def test_without_its_one_argument_it_says_how_it_is_started(arguments):
    run = start(*arguments, RANK="0")
    assert run.returncode == 2
    assert run.stderr.startswith("usage: python -m megalaunch.engine.agent -m megalaunch.engine.worker RUN/spec.yaml")


def test_outside_of_an_agent_it_says_how_it_is_started(tmp_path):
    run = start(str(tmp_path / "spec.yaml"))
    assert (run.returncode, run.stderr.split(":")[0]) == (2, "usage")


def test_a_mistyped_path_leaves_nothing_behind(tmp_path):
    run = start(str(tmp_path / "typo" / "spec.yaml"), RANK="0")
    assert run.returncode == 2
    assert f"{tmp_path / 'typo' / 'spec.yaml'} is no file" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broken_spec_is_a_crash_that_names_it(tmp_path):
    (tmp_path / "spec.yaml").write_text("version: 1\nspec: 3\n")
    run = start(str(tmp_path / "spec.yaml"), RANK="0", TORCHELASTIC_RESTART_COUNT="2")
    assert run.returncode == 1
    (event,) = read_lines(RunDirectory(tmp_path).events)
    assert (event["event"], event["rank"], event["attempt"], event["phase"]) == ("worker_failed", 0, 2, "loading torch")
    assert event["exception"] == "SpecError"
    assert "train.steps: has no value" in event["message"]


def test_an_exception_that_torch_has_wrapped_is_told_as_it_was(tmp_path):
    """Else a rank whose pipeline lost its peer would look like the one that failed."""
    directory = RunDirectory(tmp_path)
    progress = ProgressWriter(tmp_path / "progress", 0, 0)
    try:
        try:
            raise ValueError("Connection closed by peer")
        except ValueError as error:
            raise RuntimeError("[Stage 0] failed to run forward") from error
    except RuntimeError as error:
        worker._report_crash(directory, progress, 0, error)
    (event,) = read_lines(directory.events)
    assert (event["exception"], event["message"]) == ("ValueError", "Connection closed by peer")
    assert "[Stage 0] failed to run forward" in event["trace"]


def test_it_ends_at_once_when_its_launcher_is_gone(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    run = start(str(tmp_path / "spec.yaml"), RANK="0", MEGALAUNCH_LAUNCHER_PID=str(gone.pid))
    assert (run.returncode, run.stderr) == (1, "")


def test_a_crash_on_a_full_disk_is_still_that_crash(tmp_path, monkeypatch):
    import megalaunch.schema.spec_file

    def fail(path):
        raise KeyError("what really happened")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "spec.yaml").write_text("")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker, "redirect_output", lambda log: log.parent.mkdir())
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    monkeypatch.setattr(hang_dump.HangDump, "install", lambda self: None)  # it blocks SIGUSR1
    monkeypatch.setattr(megalaunch.schema.spec_file, "read_spec", fail)
    monkeypatch.setattr(worker, "_report_crash", full)
    with pytest.raises(KeyError, match="what really happened"):
        worker.main([str(tmp_path / "spec.yaml")])


@pytest.fixture
def ended(monkeypatch):
    """Exit codes of ends at once."""
    codes: list[int] = []
    monkeypatch.setattr(worker_setup.os, "_exit", codes.append)
    return codes


def test_a_request_delivered_twice_is_one_request(ended):
    stop = StopSignal()
    assert stop.signal is None
    for _ in range(2):
        stop._received(signal.SIGTERM, None)
    assert (stop.signal, ended) == (signal.SIGTERM, [])


@pytest.mark.parametrize(("second", "later"), [(signal.SIGTERM, 1.5), (signal.SIGINT, 0.0)])
def test_a_second_request_ends_at_once(ended, monkeypatch, second, later):
    stop, now = StopSignal(), time.monotonic()
    stop._received(signal.SIGTERM, None)
    monkeypatch.setattr(worker_setup.time, "monotonic", lambda: now + later)
    stop._received(second, None)
    assert ended == [128 + second]


def test_the_place_of_a_rank_is_who_called_torch():
    files = {
        "_call": "/src/megalaunch/engine/train/train_step.py",
        "check": "/home/me/plugin.py",
        "reduce": "/env/site-packages/torch/distributed/c10d.py",
        "wait": threading.__file__,
    }
    innermost_first = [(file, 7, name) for name, file in files.items()][::-1]
    assert frame_location(innermost_first) == ("plugin.py:7 check", True)
    assert frame_location(innermost_first[:1]) == ("", False)
    assert frame_location(innermost_first[3:]) == ("engine/train/train_step.py:7 _call", False)
    with pytest.raises(ValueError, match="invalid literal") as crash:
        int("x")
    assert frame_location(hang_dump._format_stack(crash.value))[0].startswith("test_worker.py:")
