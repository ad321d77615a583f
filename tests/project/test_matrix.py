"""The table of `scripts/test --matrix`; the matrix itself installs gigabytes and takes many minutes."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from paths import ROOT

SPEC = importlib.util.spec_from_file_location("matrix", ROOT / "scripts/matrix.py")
matrix = importlib.util.module_from_spec(SPEC)
sys.modules["matrix"] = matrix  # dataclasses look their module up
SPEC.loader.exec_module(matrix)


def test_what_is_not_there_has_a_row_with_its_reason():
    cells = [
        matrix.Cell("3.11", "2.13", "3.11.7 2.13.0+cpu", "passed", "38 tests passed", ["the other"]),
        matrix.Cell("3.13", "newest", "3.13.0 2.15.0", "passed", "failed", []),
        matrix.Cell("3.12", "2.13", reason="Python 3.12 is not on this machine"),
    ]
    assert matrix.table(cells).splitlines()[2:] == [
        "| 3.11.7 | 2.13.0+cpu | passed | 38 tests passed | 1 of 1 |",
        "| 3.13.0 | 2.15.0 | passed | failed | 0 of 1 |",
        "| 3.12 | 2.13 | not run | not run | Python 3.12 is not on this machine |",
    ]


def test_a_python_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(matrix, "uv", lambda: tmp_path / "uv")
    with pytest.raises(matrix.CannotHave, match=r"Python 9\.9 is not on this machine"):
        matrix.find_python("9.9")


def test_the_parity_tests_exist():
    assert all((ROOT / path).is_file() for path in matrix.PARITY)
