"""A rank that dies, stalls or calls another collective is named by its coordinates, under layouts of several axes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faulty_step import write_faulty_step
from launching import events_of, running, steps_of, wait_until, worker_pids
from training import train_tiny, training

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress

pytestmark = pytest.mark.timed

TIMEOUT, SHORT_TIMEOUT = 12, 6
STEP = 12  # of a fault: the limit of a step is known by then
TIMED = ("another_collective", "an_endless_loop")  # without a setting: the times of the table of faults
OVERRIDES = ("train.steps=400", "train.exit_at_step=40", "checkpoint.interval=5")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


def stacks_in(path: Path) -> bool:
    """Whether a log holds the stack of a thread that trains."""
    text = path.read_text(errors="replace")
    return "(most recent call first)" in text and "/megalaunch/engine/train/" in text


def named(directory: RunDirectory, exception: str) -> dict | None:
    """What was said of the rank that failed in this way."""
    return next((event for event in events_of(directory, "worker_failed") if event["exception"] == exception), None)


@pytest.mark.slow
def test_a_rank_that_dies_and_one_that_stalls(tmp_path, shared):
    directory = RunDirectory(tmp_path / "run")
    with training(
        tmp_path, "parallel=tp2pp2", *OVERRIDES, f"launcher.hang_timeout={TIMEOUT}", shared=shared
    ) as process:
        wait_until(lambda: 7 in steps_of(directory), 120)
        os.kill(read_progress(directory.progress(3)).pid, signal.SIGKILL)
        died = wait_until(lambda: named(directory, "SIGKILL"), TIMEOUT)
        assert (died["rank"], died["coordinates"]) == (3, "pp1 tp1")
        wait_until(lambda: max(steps_of(directory)) > 12, 120)
        os.kill(read_progress(directory.progress(2)).pid, signal.SIGSTOP)
        began = time.monotonic()
        stalled = wait_until(lambda: named(directory, "hang"), 60)
        assert time.monotonic() - began < TIMEOUT + 5
        assert (stalled["rank"], stalled["coordinates"]) == (2, "pp1 tp0")
        assert all(stacks_in(directory.rank_log(rank)) for rank in (0, 1, 3))
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert [line["step"] for line in read_lines(directory.metrics) if "loss" in line] == list(range(1, 41))


IN_TP = "dist.all_reduce(torch.ones(7), group=self._mesh.world_mesh['tp'].get_group())"
FAULTS = {
    "another_collective": (
        "tp2cp2",
        3,
        "cp1 tp1",
        IN_TP,
        "it waits in all_reduce of [7], which no other rank of its tp group calls",
    ),
    "one_more_barrier": (
        "tp2pp2",
        1,
        "pp0 tp1",
        "dist.barrier()",
        "it calls barrier, the other ranks of its world group call all_reduce of [2]",
    ),
    "one_more_all_reduce": ("tp2pp2", 1, "pp0 tp1", "dist.all_reduce(torch.ones(7))", "at sitecustomize.py:"),
    "one_more_of_the_same": (
        "tp2cp2",
        2,
        "cp1 tp0",
        "dist.all_reduce(torch.ones(2, dtype=torch.int64))",
        "it calls all_reduce of [2], the other ranks of its world group call all_gather of [1]; it is at engine/",
    ),
    # A match of exponential time: C code that keeps the interpreter's lock, so that no other thread of the worker runs.
    # It may answer the request for its stack, and is "busy while the other ranks wait", or not, and "has not called".
    "an_endless_loop": (
        "tp2pp2",
        2,
        "pp1 tp0",
        "__import__('re').match('(a+)+$', 60 * 'a' + 'b')",
        "the other ranks wait",
    ),
}


@pytest.mark.parametrize(
    "name", ["another_collective", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAULTS)[1:])]
)
def test_a_rank_that_falls_out_of_step(tmp_path, shared, name, record_property):
    layout, rank, coordinates, fault, said = FAULTS[name]
    write_faulty_step(tmp_path, rank, step=STEP, fault=fault)
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    limit = () if name in TIMED else (f"launcher.hang_timeout={SHORT_TIMEOUT}",)
    overrides = (f"parallel={layout}", *OVERRIDES, "launcher.max_restarts=0", *limit)
    code, _, err = train_tiny(tmp_path, *overrides, shared=shared, PYTHONPATH=python_path)
    directory = RunDirectory(tmp_path / "run")
    assert code in (5, 6), err
    assert f"rank {rank} ({coordinates})" in err
    assert said in " ".join(err.split())
    if name in ("another_collective", "one_more_barrier"):
        assert "it is at sitecustomize.py:" in " ".join(err.split())  # the call site of the one collective too many
    assert read_outcome(directory.outcome).details["rank"] == rank
    assert running(worker_pids(directory)) == []
    assert max(steps_of(directory)) == STEP - 1
    struck = directory.metrics.stat().st_mtime  # the line of the step before
    record_property("noticed", events_of(directory, "worker_failed")[0]["time"] - struck)
    record_property("end", events_of(directory, "outcome")[0]["time"] - struck)
