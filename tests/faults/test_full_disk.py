"""A disk that fills up or becomes read-only delays a run; it ends the run, on purpose, only at the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import events_of, read_only, send, steps_of, wait_until
from looped_run import metrics
from training import train_tiny, training

from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

READ_ONLY, FULL = (pytest.param(fault, marks=pytest.mark.release) for fault in ("read_only", "full"))
"""To those who write, one is like the other, and like a file system that is not there: half a minute each."""
NOTHING_BETWEEN = ("train.validation_interval=0", "checkpoint.interval=0")
NOT_CHECKED = "launcher.preflight=false"  # before the start, when the small disk already has less than a run needs
SECONDS = 10  # of a fault


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


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """No byte is free on the disk."""
    filler = disk / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, b"x" * 4096)
    os.close(descriptor)
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def unmounted(place: Path) -> Iterator[None]:
    """Nothing is mounted at `place`; then it is what it was."""
    kept = place.with_name("kept")
    kept.mkdir()
    subprocess.run(["mount", "--bind", str(place), str(kept)], check=True)
    subprocess.run(["umount", "-l", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "--bind", str(kept), str(place)], check=True)
        subprocess.run(["umount", "-l", str(kept)], check=True)


def assert_delayed(directory: RunDirectory, out: str, undisturbed: RunDirectory) -> None:
    """The run has waited once, and is that of the undisturbed one, bit for bit."""
    assert not events_of(directory, "restart")
    assert not events_of(directory, "worker_failed")
    assert out.count("the run waits") == 1, out
    assert out.count("can be written again after") == 1, out
    assert len(directory.metrics.read_text().splitlines()) == len(steps_of(directory))
    assert metrics(directory.root) == metrics(undisturbed.root)
    last = steps_of(directory)[-1]
    for shard in undisturbed.checkpoint(last).glob("*.safetensors"):
        assert (directory.checkpoint(last) / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [FULL, READ_ONLY, "unmounted"])
def test_storage_that_fails_for_a_time_delays_the_run(tmp_path, small_disk, fault, record_property):
    """It fails for longer than the limit of a hang, while metrics are written."""
    faults = {"full": lambda: full(small_disk), "unmounted": lambda: unmounted(small_disk)}
    directory, undisturbed = RunDirectory(small_disk / "run"), RunDirectory(tmp_path / "undisturbed")
    limits = ("launcher.hang_timeout=5", "launcher.step_timeout=5")
    overrides = ("train.steps=150", *NOTHING_BETWEEN, *limits, NOT_CHECKED)
    with training(tmp_path, f"run.directory={directory.root}", *overrides) as process:
        wait_until(lambda: len(steps_of(directory)) > 7, 90)
        with faults.get(fault, lambda: read_only(directory.root))():
            struck = time.time()
            time.sleep(SECONDS)
            before = len(steps_of(directory))
            assert process.poll() is None
        ended = time.monotonic()
        wait_until(lambda: len(steps_of(directory)) > before, 60)
        record_property("next step", time.monotonic() - ended)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert before < 150
    record_property("noticed", min(event["time"] for event in events_of(directory, "storage_wait")) - struck)
    assert train_tiny(tmp_path, f"run.directory={undisturbed.root}", *overrides)[0] == 0
    assert_delayed(directory, out, undisturbed)
    back = events_of(directory, "storage_back")
    assert back
    assert max(event["seconds"] for event in back) > SECONDS / 2


@contextmanager
def nearly_full(disk: Path, free: int) -> Iterator[None]:
    """Lines of metrics find space, a checkpoint does not."""
    ballast, status = disk / "ballast", os.statvfs(disk)
    ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - free))
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.release), True])
def test_a_checkpoint_that_finds_no_space_is_written_again(tmp_path, small_disk, is_async):
    directory, undisturbed = RunDirectory(small_disk / "run"), RunDirectory(tmp_path / "undisturbed")
    overrides = (
        *("train.steps=40", "checkpoint.interval=20", "train.validation_interval=0"),
        *(f"checkpoint.async_save={is_async}", "launcher.hang_timeout=5", NOT_CHECKED),
    )
    with training(tmp_path, f"run.directory={directory.root}", *overrides) as process:
        wait_until(directory.checkpoints.is_dir, 90)
        with nearly_full(small_disk, free=150_000):
            wait_until(lambda: events_of(directory, "storage_wait"), 90)
            time.sleep(SECONDS)
            assert process.poll() is None
            assert not list(directory.checkpoints.glob("step_*"))
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert f"warning: {directory.checkpoint(20).relative_to(tmp_path)} cannot be written: it needs " in out
    assert train_tiny(tmp_path, f"run.directory={undisturbed.root}", *overrides)[0] == 0
    assert_delayed(directory, out, undisturbed)
    assert verify_checkpoint(directory.checkpoint(20)) == []
    assert not list(directory.checkpoints.glob(".unfinished*"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", READ_ONLY])
def test_the_deadline_ends_the_run_and_it_resumes(tmp_path, small_disk, fault):
    """The ranks end together on the line that could not be written; if no worker can say it, the launcher does."""
    directory = RunDirectory(small_disk / "run")
    overrides = (f"run.directory={directory.root}", "train.steps=4000", *NOTHING_BETWEEN, NOT_CHECKED)
    with training(tmp_path, *overrides, "run.storage_timeout=3") as process:
        wait_until(lambda: len(steps_of(directory)) > 7, 90)
        with full(small_disk) if fault == "full" else read_only(directory.root):
            _, err = process.communicate(timeout=60)
    said = " ".join(err.split())
    assert process.returncode == 4
    what = (
        ".jsonl cannot be written: No space left on device"
        if fault == "full"
        else f"{directory.root.relative_to(tmp_path)} cannot be written: "
    )
    assert what in said
    assert "for it: run.storage_timeout)" in said
    assert "Traceback" not in err
    assert not events_of(directory, "restart")
    assert directory.rank_log(1).read_text().count("Traceback") == 0  # it ended on purpose, with the others
    code, _, err = train_tiny(tmp_path, *overrides, "train.exit_at_step=12")
    assert (code, err) == (0, "")
    assert steps_of(directory) == list(range(1, 13))


@pytest.mark.slow
def test_a_stop_ends_the_wait(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with training(tmp_path, "train.steps=4000", *NOTHING_BETWEEN) as process:
        wait_until(lambda: len(steps_of(directory)) > 7, 90)
        with read_only(directory.root):
            time.sleep(2)
            began = time.monotonic()
            send(process, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert time.monotonic() - began < 25  # of the grace period of 30
    assert process.returncode == 130
    assert f"stopped before the workers saved ({directory.root.relative_to(tmp_path)} cannot be written: " in " ".join(
        err.split()
    )
    assert read_outcome(directory.outcome) is None
