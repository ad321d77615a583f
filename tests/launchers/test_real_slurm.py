"""Real Slurm: a run of two nodes trains, resumes exactly after a requeue, and stops; skipped where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from cluster_runs import LENGTH, STEPS, agents, call, losses_of, shown, undisturbed_run
from launching import events_of, steps_of, wait_until
from mini_slurm import mini_slurm
from training import tiny_overrides
from warm_process import COLD_MEGALAUNCH

from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    with mini_slurm(tmp_path_factory.mktemp("slurm")) as variables:
        monkeypatch.setenv("MASTER_ADDR", "localhost")  # both nodes are this machine, and n1 is no name of it
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


def overrides_of(folder, *more):
    return tiny_overrides(folder / "run", "cluster.devices_per_node=1", *LENGTH, *more, shared=folder)


def test_a_run_has_the_losses_of_an_undisturbed_one_after_a_killed_agent_and_a_requeue(
    slurm, tmp_path, tmp_path_factory
):
    folder = tmp_path / "it's 100%"  # quoted for the shell, for sbatch and for the pattern of the output file
    folder.mkdir()
    run = RunDirectory(folder / "run/run")
    overrides = [word.replace("=/", "='/") + "'" if "=/" in word else word for word in overrides_of(tmp_path)]
    overrides = [
        *(word for word in overrides if not word.startswith("run.directory=")),
        'run.directory="' + str(run.root) + '"',
    ]
    job = ("launcher=slurm", "cluster.nodes=2", "launcher.slurm.time='9:00'")
    code, output = call(folder, "train", *overrides, *job, "--detach")
    assert code == 0, output
    number = str(json.loads(run.job.read_text())["id"])
    wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 24, 120)
    os.kill(agents(run, "--node-rank=1")[0], signal.SIGKILL)
    (restart,) = wait_until(lambda: events_of(run, "restart"), 60)
    assert (restart["attempt"], restart["pause_seconds"]) == (1, 0)
    assert restart["reason"].startswith("srun ended with exit code ")
    wait_until(lambda: len(events_of(run, "resumed")) == 1, 60)
    wait_until(lambda: events_of(run, "resumed")[0]["step"] + 4 < max(steps_of(run)), 60)
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    code, output = call(folder, "watch", str(run.root))
    assert code == 0, output
    assert f"job {number}: COMPLETED (on n[1-2], restart 1)" in output
    assert len(events_of(run, "resumed")) == 2
    assert "restart 1: srun ended with exit code " in (run.logs / f"slurm-{number}.out").read_text()
    assert read_outcome(run.outcome).exit_code == 0
    assert len(losses_of(run)) == STEPS
    assert losses_of(run) == losses_of(undisturbed_run(tmp_path_factory))


@pytest.mark.release  # stand-ins for its commands hold the stop of a run, and real Slurm that of shards
def test_stop_saves_and_the_job_is_not_queued_again(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run/run")
    overrides = overrides_of(tmp_path, "launcher=slurm", "cluster.nodes=2", "train.steps=2000")
    train = subprocess.Popen(
        [*COLD_MEGALAUNCH, "train", *overrides],
        cwd=tmp_path, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 3, 120)
    assert call(tmp_path, "stop", str(run.root))[0] == 0
    output, _ = train.communicate(timeout=60)
    assert train.returncode == 75, output
    assert "stopped by a signal; the run can be resumed (exit code 75)" in output
    outcome = read_outcome(run.outcome)
    assert run.checkpoint(outcome.step).is_dir()
    assert "FAILED (NonZeroExitCode, on n[1-2])" in shown("status", run.root)


def test_what_slurm_cannot_give_is_refused_before_it_waits(slurm, tmp_path):
    overrides = overrides_of(tmp_path, "launcher=slurm", "cluster.nodes=4", "batch.global_batch_size=16")
    code, output = call(tmp_path, "train", *overrides)
    assert code == 2
    assert "error: sbatch: allocation failure: " in output
