"""Workers that come back after others have taken over their run end by themselves, and change nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import wait_until
from training import train_tiny

from megalaunch.fs import list_temporary_directories
from megalaunch.process import descendants, find_process, is_stopped, kill_all, send_signal
from megalaunch.rundir.checkpoint.manifest import MANIFEST
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress
from megalaunch.schema.paths import with_value
from megalaunch.schema.spec_file import read_spec, write_spec

STEPS = 60


def start_agent(directory: RunDirectory, log: Path) -> subprocess.Popen[bytes]:
    """An agent that no launcher watches, as on a machine whose link is cut."""
    command = [sys.executable, "-m", "megalaunch.engine.agent", "--fork", "-m", "megalaunch.engine.worker"]
    with log.open("wb") as file:
        return subprocess.Popen([*command, str(directory.spec)], stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def contents(directory: RunDirectory) -> dict[str, tuple[int, bytes]]:
    """Every file of the run with its time and content; logs aside, where each attempt says how it ended."""
    files = (path for path in directory.root.rglob("*") if path.is_file() and directory.logs not in path.parents)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def stop_in_mid_save(directory: RunDirectory) -> int:
    """Stop the worker before it has written the last file of a checkpoint; return its pid.

    Later it holds the lock of the run, and new workers would kill it.
    """

    def stopped() -> int | None:
        if not list_temporary_directories(directory.checkpoints):
            return None
        worker = find_process(read_progress(directory.progress(0)).pid)
        send_signal(worker, signal.SIGSTOP)
        wait_until(lambda: is_stopped(worker))
        saves = list_temporary_directories(directory.checkpoints)
        if saves and not any((save / MANIFEST).exists() for save in saves):
            return worker.pid
        send_signal(worker, signal.SIGCONT)
        wait_until(lambda: not any(save.exists() for save in saves))
        return None

    return wait_until(stopped, 120)


@pytest.mark.timed
@pytest.mark.slow
def test_a_worker_that_was_stopped_in_mid_save(tmp_path, record_property):
    directory = RunDirectory(tmp_path / "run")
    assert train_tiny(tmp_path, f"train.steps={STEPS}", "train.exit_at_step=5", "cluster.devices_per_node=1")[0] == 0
    write_spec(with_value(read_spec(directory.spec), {"train.exit_at_step": None}), directory.spec)
    directory.outcome.unlink()
    old = start_agent(directory, tmp_path / "old.log")
    try:
        worker = stop_in_mid_save(directory)
        new = start_agent(directory, tmp_path / "new.log")
        assert new.wait(timeout=300) == 0
        assert read_outcome(directory.outcome).step == STEPS
        before = contents(directory)
        os.kill(worker, signal.SIGCONT)
        began = time.monotonic()
        old.wait(timeout=120)
        record_property("end", time.monotonic() - began)
    finally:
        kill_all(descendants(old.pid), 5)
        old.kill()
    assert contents(directory) == before
    log = directory.rank_log(0).read_text()
    assert "has taken over the run: attempt 2 changes nothing more and ends" in log
    assert "the workers of this agent change nothing more and end" in log  # which restarted them
    assert re.search(r"exitcode\s*: 75 ", (tmp_path / "old.log").read_text())
    assert list_temporary_directories(directory.checkpoints) == []
