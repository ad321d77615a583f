"""A disk that fills up or becomes read-only: the run says so once, on purpose, and goes on when it can write again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from launching import events_of, read_only, steps_of, wait_until
from training import train_tiny, training

from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

NOTHING_BETWEEN = ("train.validation_interval=0", "checkpoint.interval=0")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that fills up without harm."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, b"x" * 4096)
    os.close(descriptor)
    return filler


@pytest.mark.slow
def test_metrics_that_find_no_space(tmp_path, small_disk):
    directory = RunDirectory(small_disk / "run")
    overrides = (f"run.directory={directory.root}", "train.steps=4000", *NOTHING_BETWEEN)
    assert train_tiny(tmp_path, *overrides, "train.exit_at_step=5")[0] == 0
    with training(tmp_path, *overrides) as process:
        wait_until(lambda: len(steps_of(directory)) > 7, 90)
        filler = fill(small_disk)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert ".jsonl cannot be written: No space left on device" in " ".join(err.split())
    outcome = read_outcome(directory.outcome)
    assert outcome.exit_code == 4
    assert not events_of(directory, "restart")

    filler.unlink()
    last = outcome.step + 3
    code, _, err = train_tiny(tmp_path, *overrides, f"train.exit_at_step={last}")
    assert (code, err) == (0, "")
    assert steps_of(directory) == list(range(1, last + 1))


@pytest.mark.slow
def test_a_run_directory_that_becomes_read_only(tmp_path):
    """The ranks end together on the line that could not be written, and the launcher says it: no worker can."""
    directory = RunDirectory(tmp_path / "run")
    overrides = ("train.steps=4000", *NOTHING_BETWEEN)
    with training(tmp_path, *overrides) as process:
        wait_until(lambda: len(steps_of(directory)) > 3, 90)
        with read_only(directory.root):
            _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert f"{directory.root} cannot be written: " in " ".join(err.split())
    assert "Traceback" not in err
    assert not events_of(directory, "restart")
    assert directory.rank_log(1).read_text().count("Traceback") == 0  # it ended on purpose, with the others
    code, _, err = train_tiny(tmp_path, *overrides, "train.exit_at_step=8")
    assert (code, err) == (0, "")
