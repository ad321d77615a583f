"""The list of what was skipped, at the end of a run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import TESTS
from slow_cases import slow_but

WHOLE = """
import pytest
reference = pytest.importorskip("no_such_reference", reason="the reference is not installed")
def test_a(): pass
def test_b(): pass
"""
PARTLY = """
import pytest
def test_a(): pytest.importorskip("no_such_reference", reason="the reference is not installed")
@pytest.mark.parametrize("case", [1, 2])
@pytest.mark.skipif(True, reason="no root")
def test_b(case): pass
@pytest.mark.xfail
def test_c(): assert False
def test_d(): pass
"""


@pytest.mark.parametrize("workers", slow_but([[], ["-p", "xdist", "-n", "2"]], []))
def test_files_and_tests_are_counted_by_reason(tmp_path, workers):
    (tmp_path / "test_whole.py").write_text(WHOLE)
    (tmp_path / "test_partly.py").write_text(PARTLY)
    command = [sys.executable, "-m", "pytest", "-p", "skipped", "-p", "no:cacheprovider", *workers]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ |= {"PYTHONPATH": str(TESTS / "support"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of plugins 3 s a process
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.partition("NOT PROVEN HERE")[2].splitlines()
    assert told[1:3] == [
        "2 tests: no root",
        "at least 3 tests (1 whole files): the reference is not installed",
    ]
    (tmp_path / "test_whole.py").write_text("def test_a(): pass")
    (tmp_path / "test_partly.py").unlink()
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout
    assert "NOT PROVEN HERE" not in done.stdout
