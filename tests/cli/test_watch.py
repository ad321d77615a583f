"""`megalaunch watch`: a run seen from elsewhere."""

from __future__ import annotations

import subprocess

import pytest
from launching import launched, run_fake, run_of, steps_of, tiny_spec, wait_until
from typer.testing import CliRunner
from warm_process import MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.launch.directory import lock_run


def watch(path):
    return CliRunner().invoke(app, ["watch", str(path)])


@pytest.fixture
def spec():
    values = {"model__vocab_size": 32, "model__num_query_groups": 1, "model__head_dim": 8, "platform__chip": "cpu"}
    return tiny_spec(**values, precision__compute_dtype="fp32", logging__log_interval=5)


def test_what_is_no_run(tmp_path):
    result = watch(tmp_path)
    assert result.exit_code == 2
    assert "is not a run directory" in result.stderr


def test_a_run_that_is_over(tmp_path, spec):
    assert run_fake(tmp_path, spec)[0] == 0
    result = watch(run_of(tmp_path).root)
    assert result.exit_code == 0, result.output
    assert "counted to 20" in result.stdout


def test_a_failed_run_has_its_exit_code(tmp_path, spec):
    code, _, _ = run_fake(tmp_path, spec, FAKE_FAULT="raise:0:3:99")
    result = watch(run_of(tmp_path).root)
    assert result.exit_code == code == 8
    assert "ValueError: told to fail" in result.stderr


def test_a_killed_run_says_so(tmp_path, spec):
    with launched(tmp_path, spec, FAKE_STEP_SECONDS="0.5") as process:
        wait_until(lambda: steps_of(run_of(tmp_path)))
        process.kill()
        process.wait()
    result = watch(run_of(tmp_path).root)
    assert result.exit_code == 5
    assert "left no outcome: it was killed" in result.stderr


def test_a_running_one_is_followed_to_its_end(tmp_path, spec):
    with launched(tmp_path, spec, FAKE_STEP_SECONDS="0.2") as process:
        wait_until(lambda: steps_of(run_of(tmp_path)))
        command = [*MEGALAUNCH, "watch", str(run_of(tmp_path).root)]
        watched = subprocess.run(command, capture_output=True, text=True, timeout=60)
        process.communicate(timeout=60)
    assert watched.returncode == 0, watched.stderr
    assert "step 20/20  loss" in watched.stdout
    assert "counted to 20" in watched.stdout


def test_leaving_does_not_touch_the_run(tmp_path, spec, monkeypatch):
    import megalaunch.cli.train.watch

    run = run_of(tmp_path)
    assert run_fake(tmp_path, spec)[0] == 0

    def interrupted(view, display):
        raise KeyboardInterrupt

    monkeypatch.setattr(megalaunch.cli.train.watch, "_tail", interrupted)
    lock = lock_run(run)
    try:
        result = watch(run.root)
    finally:
        lock.release()
    assert (result.exit_code, result.stdout.strip().splitlines()[-1]) == (0, "the run continues")
