"""Workers under NVRx's own `ft_launcher`: its monitor kills a rank that stands still, and the run resumes exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import yaml
from cluster_runs import LENGTH, STEPS, losses_of, undisturbed_run
from launching import events_of, steps_of, wait_until
from training import tiny_overrides
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.process import descendants, kill_all
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress

_LAUNCHER = ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node=2", "--max-restarts=2")
_HERE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
_TIMEOUTS = {
    "workload_check_interval": 0.5,
    "initial_rank_heartbeat_timeout": None,
    "rank_heartbeat_timeout": None,
    "rank_section_timeouts": {"setup": 120.0, "step": 8.0, "checkpointing": 60.0},
    "rank_out_of_section_timeout": 60.0,
    "enable_nic_monitor": False,
}


@pytest.mark.slow
@pytest.mark.timed
def test_a_stopped_rank_is_killed_by_its_monitor_and_the_run_resumes_exactly(tmp_path, tmp_path_factory):
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    overrides = tiny_overrides(tmp_path, *LENGTH, "launcher.enable_ft_package=true")
    prepared = CliRunner().invoke(app, ["train", *overrides, "--prepare-only"])
    assert prepared.exit_code == 0, prepared.output
    run = RunDirectory(tmp_path / "run")
    settings = tmp_path / "ft.yaml"
    settings.write_text(yaml.safe_dump({"fault_tolerance": _TIMEOUTS}))
    worker = ("-m", "megalaunch.engine.worker", str(run.spec))
    command = [sys.executable, *_LAUNCHER, *_HERE, f"--ft-cfg-path={settings}", *worker]
    with (tmp_path / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_until(lambda: launcher.poll() is not None or 30 in steps_of(run), 180)
        stopped = read_progress(run.progress(1)).pid
        os.kill(stopped, signal.SIGSTOP)
        assert launcher.wait(240) == 0
    finally:
        left = descendants(launcher.pid)
        launcher.kill()
        kill_all(left, 5)
    said = (tmp_path / "launcher.log").read_text()
    assert "Section 'step' has been open for 8." in said
    assert "FT timeout elapsed" in said
    assert said.count(" were still open.") <= 2  # those of the first attempt: the last one has closed its sections
    assert events_of(run, "resumed")[-1]["step"] >= 20
    assert read_outcome(run.outcome).step == STEPS
    assert losses_of(run) == losses_of(undisturbed_run(tmp_path_factory))
