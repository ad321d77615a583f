"""The lock of a run directory: it names its holder, and goes with it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from launching import wait_until

from megalaunch.launch.lock import RunLock, RunLocked, holder_is_alive, read_holder

_HOLD = """
import sys, time
from pathlib import Path
from megalaunch.launch.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_one_is_refused_by_name_within_a_second(tmp_path, holder):
    began = time.monotonic()
    with pytest.raises(RunLocked) as refused:
        RunLock(tmp_path / "lock")
    assert time.monotonic() - began < 1
    year = time.strftime("%Y-")
    assert f"{tmp_path} is in use: process {holder.pid} on {socket.gethostname()} since {year}" in str(refused.value)


def test_a_dead_holder_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert read_holder(tmp_path / "lock").pid == holder.pid
    lock = RunLock(tmp_path / "lock")
    assert read_holder(tmp_path / "lock").pid == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_reused_pid_is_no_holder(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "started": -5, "host": socket.gethostname(), "since": 0.0}))
    RunLock(path).release()


def test_a_holder_on_another_machine_counts_while_it_touches_its_lock(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "started": 5, "host": "elsewhere", "since": 0.0}))
    with pytest.raises(RunLocked, match="process 1 on elsewhere since 1970"):
        RunLock(path)
    os.utime(path, (time.time() - 61, time.time() - 61))
    RunLock(path).release()


def test_a_file_system_without_locks_goes_by_the_contents(tmp_path, holder, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunLocked, match=f"process {holder.pid} "):
        RunLock(tmp_path / "lock")
    holder.kill()
    holder.wait()
    RunLock(tmp_path / "lock").release()


def test_a_lock_removed_while_it_is_taken_is_taken_again(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    real, calls = fcntl.flock, []

    def flock(descriptor, operation):
        real(descriptor, operation)
        if not calls:
            path.unlink()  # the last holder releases it right now
        calls.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(path)
    assert len(calls) == 2
    assert read_holder(path).pid == os.getpid()
    lock.release()


def test_a_torn_lock_names_nobody(tmp_path):
    path = tmp_path / "lock"
    path.write_text('{"pid": 1')
    assert read_holder(path) is None
    RunLock(path).release()


def test_touching_keeps_it_young(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    lock = RunLock(path)
    os.utime(path, (0, 0))
    lock.touch()
    assert path.stat().st_mtime == 0  # cheap: not every time
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    lock.touch()
    assert path.stat().st_mtime > 0
    lock.release()


def test_liveness_of_a_holder(tmp_path, holder):
    path = tmp_path / "lock"
    found = read_holder(path)
    assert holder_is_alive(found, path)
    holder.kill()
    wait_until(lambda: not holder_is_alive(found, path))
