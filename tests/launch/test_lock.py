"""The lock of a run directory: it names its holder, and goes with it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import wait_until

import megalaunch.launch.lock
from megalaunch.launch.file_system import has_local_locks
from megalaunch.launch.lock import RunLock, RunLocked, is_locked, read_holder

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
    assert f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since {year}" in str(refused.value)


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


ELSEWHERE = json.dumps({"pid": 1, "started": 5, "host": "elsewhere", "since": 0.0})


@pytest.fixture
def no_locks(monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_flock_decides_whatever_host_name_a_dead_holder_had(tmp_path):
    """The name of a machine changes (a container, a laptop on another network), and so may its clock."""
    path = tmp_path / "lock"
    path.write_text(ELSEWHERE)
    os.utime(path, (time.time() + 3600, time.time() + 3600))
    assert not is_locked(path)
    RunLock(path).release()


def test_a_holder_on_another_machine_counts_while_it_touches_its_lock(tmp_path, no_locks):
    path = tmp_path / "lock"
    path.write_text(ELSEWHERE)
    assert is_locked(path)
    with pytest.raises(RunLocked, match="process 1 on elsewhere since 1970"):
        RunLock(path)
    os.utime(path, (time.time() - 61, time.time() - 61))
    assert not is_locked(path)
    RunLock(path).release()
    assert list(tmp_path.iterdir()) == []


def test_storage_that_fails_is_no_other_holder(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"):
        RunLock(tmp_path / "lock")
    assert not is_locked(tmp_path / "lock")


def test_a_heartbeat_is_held_against_the_clock_that_stamped_it(tmp_path, no_locks, monkeypatch):
    path = tmp_path / "lock"
    path.write_text(ELSEWHERE)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)  # this machine's clock is fast: the heartbeat is not old
    with pytest.raises(RunLocked, match="on elsewhere"):
        RunLock(path)
    os.utime(path, (now - 61, now - 61))
    monkeypatch.setattr(time, "time", lambda: now - 3600)  # it is slow: an old heartbeat is not young
    RunLock(path).release()


MOUNTS = """22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /shared rw,relatime - nfs4 server:/ rw,vers=4.2,hard
24 22 0:23 / /unlocked rw,relatime - nfs server:/ rw,nolock,local_lock=all
25 22 0:24 / /lustre rw,localflock - lustre 10.0.0.1@tcp:/fs rw
26 22 0:25 / /home\\040of/me rw - fuse.sshfs me@host: rw
27 22 0:26 / /unlocked/inside rw - ext4 /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("place", "local"),
    [
        ("/runs", False),
        ("/shared/runs", False),
        ("/sharedruns", False),
        ("/unlocked/runs", True),
        ("/lustre/runs", True),
        ("/home of/me/runs", True),
        ("/unlocked/inside/runs", False),
    ],
)
def test_file_systems_whose_locks_other_machines_do_not_see(tmp_path, place, local):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.replace("\\\\", "\\"))
    assert has_local_locks(Path(place) / "lock", mounts) == local


def test_where_locks_stay_on_this_machine_the_heartbeat_counts_too(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    path.write_text(ELSEWHERE)
    monkeypatch.setattr(megalaunch.launch.lock, "has_local_locks", lambda path: True)
    assert is_locked(path)
    with pytest.raises(RunLocked, match="on elsewhere"):
        RunLock(path)


def test_asking_whether_it_is_held_keeps_nobody_from_taking_it(tmp_path):
    path = tmp_path / "lock"
    path.write_text("")
    with path.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.03, lambda: fcntl.flock(asking, fcntl.LOCK_UN)).start()
        RunLock(path).release()
        time.sleep(0.05)


def test_touch_and_release_raise_nothing_in_a_directory_that_is_read_only_by_now(tmp_path, monkeypatch):
    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    lock = RunLock(tmp_path / "lock")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    lock.touch()
    lock.release()
    lock.release()
    monkeypatch.undo()
    RunLock(tmp_path / "lock").release()  # what stayed behind holds nobody up


def test_a_file_system_without_locks_goes_by_the_contents(tmp_path, holder, no_locks):
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


def test_whether_it_is_held(tmp_path, holder):
    path = tmp_path / "lock"
    assert is_locked(path)
    holder.kill()
    wait_until(lambda: not is_locked(path))
    assert not is_locked(tmp_path / "none")
