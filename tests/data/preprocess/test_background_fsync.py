"""A file is brought to the disk while it grows, and a failure there is told by `finish`."""

import os
import threading

import pytest

from megalaunch.data.preprocess import state
from megalaunch.data.preprocess.state import BackgroundFsync


def test_it_syncs_what_was_written_and_tells_of_failures(monkeypatch):
    synced, failing = [], threading.Event()

    def fdatasync(file):
        synced.append(file)
        if failing.is_set():
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(state, "_SYNCED_AT_ONCE", 100)
    sync = BackgroundFsync()
    sync.notify_written(7, 99)
    sync.finish()
    assert synced == []
    sync.notify_written(7, 1)
    sync.finish()
    assert synced == [7]
    failing.set()
    sync.notify_written(7, 100)
    with pytest.raises(OSError, match="Input/output error"):
        sync.finish()
    sync.finish()  # it is told once
    sync.close()


def test_one_at_a_time(monkeypatch):
    go, calls = threading.Event(), []

    def fdatasync(file):
        calls.append(file)
        go.wait(60)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(state, "_SYNCED_AT_ONCE", 10)
    sync = BackgroundFsync()
    for _ in range(5):
        sync.notify_written(7, 10)
    go.set()
    sync.finish()
    assert calls == [7]
    sync.notify_written(7, 1)  # with the four that were written meanwhile it is time again
    sync.finish()
    assert calls == [7, 7]
    sync.close()
