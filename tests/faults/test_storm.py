"""A storm of random faults ends as the run that nothing happened to; a storm that finds a difference says so."""

from __future__ import annotations

import importlib
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from paths import ROOT

from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def fault_storm(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("fault_storm")


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(("faults", "seed"), [(3, 6), pytest.param(8, 3, marks=pytest.mark.release)])
def test_many_faults_in_one_run(tmp_path, faults, seed):
    command = [sys.executable, ROOT / "scripts" / "faults.py", "--storm", f"--faults={faults}", f"--seed={seed}"]
    done = subprocess.run([*command, f"--out={tmp_path / 'storm'}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit; nothing is left" in done.stdout


def test_the_schedule_has_all_kinds_and_follows_from_the_seed(fault_storm):
    strikes = fault_storm.make_schedule(50, seed=1)
    assert strikes == fault_storm.make_schedule(50, seed=1) != fault_storm.make_schedule(50, seed=2)
    assert {strike.kind for strike in strikes} == set(fault_storm.KINDS)
    early = [strike.steps == 0 for strike in strikes]
    assert any(early)
    assert not early[0]
    assert not any(first and second for first, second in pairwise(early))


def test_what_a_run_leaves_is_named(fault_storm, tmp_path):
    temporary, run = tmp_path / "tmp", tmp_path / "run"
    for file in (temporary / "torchinductor_me", temporary / "pile", run / "lock", run / ".outcome.json.unfinished"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    struck = SimpleNamespace(
        directory=RunDirectory(run), temporary=temporary, processes=lambda: [SimpleNamespace(pid=12)]
    )
    assert sorted(fault_storm.leftovers(struck)) == [
        f"{run}/.outcome.json.unfinished is left",
        f"{run}/lock is left",
        f"{temporary}/pile is left",
        "process 12 is left",
    ]
