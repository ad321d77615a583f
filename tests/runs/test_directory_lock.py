"""The lock of a run that starts: a first start is refused at once, a restart waits for a lost machine's."""

from __future__ import annotations

import os
import threading

import pytest
import typer

from megalaunch.launch.lock import RunLock
from megalaunch.rundir.environment import ATTEMPT_VARIABLE
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs import directory_lock
from megalaunch.runs.directory_lock import lock_directory


def test_a_restart_takes_the_lock_once_it_is_free(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    held = RunLock(RunDirectory(tmp_path).lock)
    threading.Timer(0.2, held.release).start()
    lock_directory(RunDirectory(tmp_path)).release()
    said = capsys.readouterr().out
    assert f"is in use by process {os.getpid()} on " in said
    assert said.endswith(": this restart waits up to 180 s, in case its machine was lost\n")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_a_lock_that_stays_refuses_the_start(attempt, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
    if attempt == "1":
        monkeypatch.setattr(directory_lock, "_LOST_SECONDS", 0.1)
    held = RunLock(RunDirectory(tmp_path).lock)
    with pytest.raises(typer.Exit):
        lock_directory(RunDirectory(tmp_path))
    assert "fix:  wait for it or stop it there, or name another run.directory" in capsys.readouterr().err
    held.release()
