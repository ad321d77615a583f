"""Writes that wait for the storage: in order, none lost, none torn, and only for errors that pass."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megalaunch import fs
from megalaunch.rundir import storage_wait as wait_module
from megalaunch.rundir.pending_writes import PendingWrites
from megalaunch.rundir.storage_wait import LONGEST_PAUSE, STOP_SECONDS, StorageWait


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(wait_module.time, "monotonic", lambda: Clock.now)
    Clock.now = 100.0
    return Clock


class Disk:
    """Files in memory whose writes fail on demand."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.lines: list[str] = []
        self.tries = 0

    def writer(self, line: str):
        def write() -> None:
            self.tries += 1
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            self.lines.append(line)

        return write


def test_writes_follow_in_order_when_the_storage_is_back(clock):
    disk, other, told = Disk(), Disk(), []
    pending = PendingWrites(
        StorageWait(600.0),
        lambda failed: told.append(f"{failed.path}: {failed.error.strerror}"),
        lambda failed, seconds: told.append(f"{failed.path} after {seconds:.0f} s"),
    )
    pending.add(Path("a"), disk.writer("1"))
    disk.error = errno.ENOSPC
    for line in ("2", "3", "4"):
        pending.add(Path("a"), disk.writer(line))
    pending.add(Path("b"), other.writer("x"))  # another file does not wait
    assert (disk.lines, other.lines) == (["1"], ["x"])
    disk.error = None
    pending.add(Path("a"), disk.writer("5"))
    assert disk.lines == ["1"]  # the next try is not due
    clock.now += 12
    pending.add(Path("a"), disk.writer("6"))
    assert disk.lines == ["1", "2", "3", "4", "5", "6"]
    assert told == ["a: No space left on device", "a after 12 s"]
    assert pending.failed is None


def test_tries_become_rare(clock):
    disk = Disk()
    disk.error = errno.EROFS
    pending = PendingWrites(StorageWait(600.0))
    pending.add(Path("a"), disk.writer("1"))
    for _ in range(6000):
        clock.now += 0.01
        pending.flush()
    assert 60 / LONGEST_PAUSE < disk.tries < 60 / LONGEST_PAUSE + 10


def test_an_error_that_does_not_pass_is_no_reason_to_wait(clock):
    disk, later = Disk(), Disk()
    disk.error = errno.ELOOP
    pending = PendingWrites(StorageWait(600.0))
    pending.add(Path("a"), disk.writer("1"))
    pending.add(Path("a"), later.writer("2"))
    assert pending.refused is not None
    assert pending.refused.error.errno == errno.ELOOP
    assert pending.failed is None
    assert later.lines == ["2"]


def test_a_write_may_add_a_write(clock):
    disk = Disk()
    pending = PendingWrites(StorageWait(600.0), ends=lambda *_: pending.add(Path("a"), disk.writer("back")))
    disk.error = errno.EIO
    pending.add(Path("a"), lambda: (disk.writer("1")(), pending.add(Path("a"), disk.writer("2"))))
    disk.error = None
    pending.flush(at_once=True)
    assert disk.lines == ["1", "2", "back"]


def test_the_wait_is_over_at_the_deadline_or_soon_after_a_stop(clock):
    stopped = False
    wait = StorageWait(600.0, lambda: stopped)
    assert not wait.is_over
    wait.fail()
    clock.now += 599
    assert not wait.is_over
    assert wait.seconds_left == pytest.approx(1)
    clock.now += 2
    assert wait.is_over
    assert wait.succeed() == pytest.approx(601)
    wait.fail()
    stopped = True
    assert not wait.is_over
    clock.now += STOP_SECONDS
    assert wait.is_over
    ended_at_once = StorageWait(0.0)
    ended_at_once.fail()
    assert ended_at_once.is_over


def test_a_part_of_a_line_that_a_full_disk_took_is_removed(tmp_path, monkeypatch):
    path, real = tmp_path / "metrics.jsonl", os.write
    fs.append_line(path, b'{"step": 1}\n')
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:5]))
    with pytest.raises(OSError, match="No space left"):
        fs.append_line(path, b'{"step": 2}\n')
    assert path.read_bytes() == b'{"step": 1}\n'
    monkeypatch.setattr(os, "write", real)
    fs.append_line(path, b'{"step": 2}\n')
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
