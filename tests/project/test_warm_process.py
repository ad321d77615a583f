"""A command that cannot be forked is started as usual, and one that is forked behaves as one that starts."""

import logging
import os
import subprocess
import sys
import time

import pytest
import warm_process
from paths import ROOT
from warm_process import MEGALAUNCH


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    """An earlier test of this process may have loaded it."""
    monkeypatch.delitem(sys.modules, "ray._raylet", raising=False)


def test_a_fork_that_does_not_begin_prints_its_stack_and_is_replaced(monkeypatch, capfd):
    monkeypatch.setattr(warm_process, "_STARTS_WITHIN", 1.0)
    monkeypatch.setattr(warm_process, "_reset_python", lambda: time.sleep(60))
    done = subprocess.run([*MEGALAUNCH, "--version"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("megalaunch ")
    assert "Timeout (0:00:01)!" in capfd.readouterr().err


def test_a_process_that_has_loaded_ray_starts_commands_as_usual(monkeypatch):
    command = [*MEGALAUNCH, "--version"]
    assert warm_process._program(command) is not None
    monkeypatch.setitem(sys.modules, "ray._raylet", object())
    assert warm_process._program(command) is None


def test_a_process_of_tests_has_no_openmp_pool_whatever_the_shell_sets():
    """A worker with two threads, forked by an agent that is forked from a process with a pool, never returns."""
    program = "import os, conftest; print(os.environ['OMP_NUM_THREADS'])"
    tests = str(ROOT / "tests")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": tests}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=50)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_fork_logs_to_its_own_standard_error_whatever_has_set_up_logging_before(monkeypatch):
    """Libraries, such as a tracker's, call `dictConfig`, which empties logging's list of handlers."""
    program = 'import logging; logging.getLogger("torch.distributed").error("it failed")'
    monkeypatch.setattr(warm_process, "PROGRAMS", {program})
    monkeypatch.setattr(logging, "_handlerList", [])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert "it failed" in done.stderr
    assert "Logging error" not in done.stderr
