"""The table of faults: its tests exist, and docs/reliability.md has the table that scripts/faults makes."""

from __future__ import annotations

import ast
import importlib.util
import sys

import pytest
from paths import ROOT

SPECIFICATION = importlib.util.spec_from_file_location("faults", ROOT / "scripts" / "faults.py")
faults = importlib.util.module_from_spec(SPECIFICATION)
sys.modules["faults"] = faults
SPECIFICATION.loader.exec_module(faults)


@pytest.mark.parametrize("case", faults.cases(), ids=lambda case: case.name)
def test_a_fault_has_tests_that_exist_or_a_reason(case):
    assert bool(case.tests) == bool(case.happens) != bool(case.reason)
    for name in case.tests:
        path, _, function = name.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not function or function in found, name


def test_the_page_has_the_table():
    text = faults.PAGE.read_text(encoding="utf-8")
    assert text.split(faults.BEGIN)[1].split(faults.END)[0] == faults.table(), "scripts/faults --table"


def test_other_arguments_are_refused(capsys):
    assert faults.main(["F99"]) == 2
    assert "scripts/faults [F1...]" in capsys.readouterr().err
