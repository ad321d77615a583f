"""Faults against whole runs of recipe=tiny: whatever happens, the run ends as the one that nothing happened to."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import events_of, running, steps_of, wait_until, worker_pids
from made_once import made_once
from same_run import differences
from training import train_tiny, training

from megalaunch.engine.checkpoint.store import verify_checkpoint
from megalaunch.process import descendants
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress

STEPS = 60  # two seconds of steps: time enough to strike in the middle


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> RunDirectory:
    """The run that nothing happens to."""

    def make(folder: Path) -> None:
        temporary = folder / "tmp"
        temporary.mkdir()
        code, _, err = train_tiny(folder, f"train.steps={STEPS}", TMPDIR=str(temporary))
        assert (code, err) == (0, "")
        assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []

    return RunDirectory(made_once(tmp_path_factory, "undisturbed", make) / "run")


def assert_same_run(directory: RunDirectory, undisturbed: RunDirectory) -> None:
    """The same metrics, each line once, and the same weights and moments, bit for bit."""
    assert differences(directory, undisturbed, STEPS) == []


def kill_rank_at(directory: RunDirectory, rank: int, step: int) -> int:
    """kill -9 a worker once the metrics have reached a step; its pid."""

    def reached() -> bool:
        return step <= max(steps_of(directory), default=0)

    wait_until(reached, 60)
    pid = read_progress(directory.progress(rank)).pid
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.timed
@pytest.mark.parametrize(
    ("rank", "step"),
    [pytest.param(0, 3, id="before_the_first_checkpoint", marks=pytest.mark.slow), pytest.param(1, 14, id="after_one")],
)
def test_a_killed_worker(tmp_path, shared, undisturbed, rank, step):
    directory = RunDirectory(tmp_path / "run")
    with training(tmp_path, f"train.steps={STEPS}", shared=shared) as process:
        kill_rank_at(directory, rank, step)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    (restart,) = events_of(directory, "restart")
    assert f"rank {rank} (dp{rank}) failed" in restart["reason"]
    assert "SIGKILL: killed from outside, possibly by the out-of-memory killer" in out
    assert_same_run(directory, undisturbed)


@pytest.mark.timed
@pytest.mark.slow
def test_a_worker_that_is_killed_while_the_ranks_start_is_known_at_once(tmp_path, shared):
    """The other rank waits for it, and would see nothing for minutes."""
    directory = RunDirectory(tmp_path / "run")
    with training(tmp_path, f"train.steps={STEPS}", shared=shared) as process:
        pid = wait_until(lambda: joining(directory, rank=1), 60)
        os.kill(pid, signal.SIGKILL)
        struck = time.time()
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    (restart,) = events_of(directory, "restart")
    assert "rank 1" in restart["reason"]
    assert restart["time"] - struck < 4  # 1 s, for what the other rank may have to say


def joining(directory: RunDirectory, rank: int) -> int | None:
    """The pid of a rank that loads torch, or waits for the others."""
    progress = read_progress(directory.progress(rank))
    return progress.pid if progress and progress.phase in ("loading torch", "joining") else None


@pytest.mark.timed
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stop_then_the_same_command(tmp_path, shared, undisturbed, number, code):
    directory = RunDirectory(tmp_path / "run")
    with training(tmp_path, f"train.steps={STEPS}", shared=shared) as process:
        wait_until(lambda: 5 in steps_of(directory), 60)
        process.send_signal(number)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - began < 30
    stopped_at = read_outcome(directory.outcome).step
    assert stopped_at < STEPS
    assert str(directory.checkpoint(stopped_at).relative_to(tmp_path)) in out
    assert "run the same command to resume" in err
    assert running(worker_pids(directory)) == []
    assert train_tiny(tmp_path, f"train.steps={STEPS}", shared=shared)[0] == 0
    assert_same_run(directory, undisturbed)


@pytest.mark.timed
@pytest.mark.slow
def test_a_stopped_process_is_a_hang_that_names_it(tmp_path, shared, undisturbed):
    directory = RunDirectory(tmp_path / "run")
    overrides = (f"train.steps={STEPS}", "launcher.hang_timeout=6")
    with training(tmp_path, *overrides, shared=shared) as process:
        wait_until(lambda: 12 in steps_of(directory), 60)
        os.kill(read_progress(directory.progress(1)).pid, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: events_of(directory, "worker_failed"), 15)
        assert time.monotonic() - began < 10
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    failed = events_of(directory, "worker_failed")[0]
    assert (failed["rank"], failed["exception"]) == (1, "hang")
    assert_same_run(directory, undisturbed)


@pytest.mark.timed
@pytest.mark.slow
def test_a_stopped_process_is_found_in_15_seconds_without_a_setting(tmp_path, shared):
    directory = RunDirectory(tmp_path / "run")
    with training(tmp_path, "train.steps=100000", shared=shared):
        wait_until(lambda: max(steps_of(directory), default=0) > 100, 90)
        os.kill(read_progress(directory.progress(1)).pid, signal.SIGSTOP)
        began = time.monotonic()
        (failed,) = wait_until(lambda: events_of(directory, "worker_failed"), 60)
        assert 11 < time.monotonic() - began < 30  # 12 s, and an answer from the other rank
    assert (failed["rank"], failed["exception"]) == (1, "hang")


@pytest.mark.slow
def test_a_flipped_byte_in_the_newest_checkpoint(tmp_path, shared, undisturbed):
    directory = RunDirectory(tmp_path / "run")
    assert train_tiny(tmp_path, f"train.steps={STEPS}", "train.exit_at_step=20", shared=shared)[0] == 0
    shard = next(directory.checkpoint(20).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    code, out, err = train_tiny(tmp_path, f"train.steps={STEPS}", shared=shared)
    assert (code, err) == (0, "")
    assert "step_00000020 is invalid and skipped" in out
    assert shard.name in out
    assert "resuming after step 10" in out
    assert_same_run(directory, undisturbed)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(tmp_path, shared):
    code, _, err = train_tiny(
        tmp_path, "optimizer.lr=1e39", "optimizer.weight_decay=0", "optimizer.clip_grad=0", shared=shared
    )
    assert code == 7
    lines = err.splitlines()
    assert len(lines) <= 15
    assert lines[0] == "megalaunch: the loss or the gradient is not finite (exit code 7)"
    for part in ("the loss of step 2 is not finite", "on rank 0 (dp0)", "sample 8 of train", "run     ", "next    "):
        assert part in err, part
    assert max(steps_of(RunDirectory(tmp_path / "run"))) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that fills up without harm."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.release  # test_full_disk.py has the same end, and a checkpoint that waits for space
@pytest.mark.parametrize("beside", ["false", "true"])
def test_a_full_disk_while_saving(small_disk, shared, undisturbed, beside):
    directory = RunDirectory(small_disk / "run")
    overrides = (f"train.steps={STEPS}", f"checkpoint.async_save={beside}", "launcher.preflight=false")
    assert train_tiny(small_disk, *overrides, "train.exit_at_step=10", shared=shared)[0] == 0
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        status = os.statvfs(small_disk)
        file.write(bytes(status.f_bavail * status.f_frsize - 150_000))
    code, _, err = train_tiny(small_disk, *overrides, "run.storage_timeout=2", shared=shared)
    assert code == 4, err
    assert "no space left for the checkpoint" in err
    assert str(directory.checkpoint(20)) in err
    assert "free" in err
    assert len(err.splitlines()) <= 15
    assert verify_checkpoint(directory.checkpoint(10)) == []
    ballast.unlink()
    assert train_tiny(small_disk, *overrides, shared=shared)[0] == 0
    assert_same_run(directory, undisturbed)


def _kill_launchers(folder: Path, shared: Path, times: int, seed: int) -> list[str]:
    """kill -9 the launcher at random moments; where its workers were. Nothing may live 5 s longer."""
    directory, source, moments = RunDirectory(folder / "run"), random.Random(seed), []
    for _ in range(times):
        overrides = ("train.steps=100000", "checkpoint.interval=1", "train.validation_interval=7")
        with training(folder, *overrides, shared=shared) as process:
            wait_until(lambda: len(descendants(process.pid)) > source.choice((0, 1, 2)), 60)
            if source.random() < 0.7:  # else in the first moments: agent and workers load torch
                known = len(steps_of(directory))
                wait_until(lambda: len(steps_of(directory)) != known, 60)  # noqa: B023
            time.sleep(source.random())
            tree = [found.pid for found in descendants(process.pid)]
            where = read_progress(directory.progress(0))
            moments.append(where.phase if where and where.pid in tree else "loading")
            process.kill()
            began = time.monotonic()
            wait_until(lambda: not running(tree), 5)  # noqa: B023
            assert time.monotonic() - began < 5
    return moments


@pytest.mark.timed
@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(tmp_path, shared):
    _kill_launchers(tmp_path, shared, 3, seed=1)
    # The next start works without cleaning up.
    directory = RunDirectory(tmp_path / "run")
    last = max((int(path.name[5:]) for path in directory.checkpoints.glob("step_*")), default=0) + 3
    overrides = (f"train.steps={last}", "data.num_samples=800000", "schedule.decay_steps=100000")
    code, _, err = train_tiny(tmp_path, *overrides, shared=shared)
    assert (code, err) == (0, "")
    steps = [record["step"] for record in read_lines(directory.metrics) if "loss" in record]
    assert steps == list(range(1, last + 1))


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.release
def test_nothing_outlives_a_launcher_killed_twenty_times(tmp_path, shared):
    moments = _kill_launchers(tmp_path, shared, 20, seed=2)
    assert len(set(moments)) > 2, moments
