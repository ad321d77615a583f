"""The table of faults: its tests exist, and docs/reliability.md has the table that scripts/faults makes."""

from __future__ import annotations

import ast
import importlib.util
import re
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


@pytest.mark.parametrize("case", faults.cases(), ids=lambda case: case.name)
def test_a_fault_has_a_test_of_every_day_or_says_why_not(case):
    runs = [name for name in case.tests if not only_before_a_release(name)]
    assert case.reason or bool(runs) != bool(case.release), case.release or f"{case.tests} run only before a release"


@pytest.mark.parametrize("case", faults.cases(), ids=lambda case: case.name)
def test_a_fault_has_times_or_says_why_not(case):
    assert [bool(case.strike), bool(case.timed), bool(case.untimed)].count(True) == 1
    assert bool(faults.read_times().get(case.name)) != bool(case.untimed)
    if case.timed:  # the test records them
        path, _, function = case.timed.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        (test,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        assert "record_property" in {argument.arg for argument in test.args.args}, case.timed


def only_before_a_release(name: str) -> bool:
    """Whether all tests of a file, or all cases of one test, are marked `release`."""
    path, _, function = name.partition("[")[0].partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if any(is_released(mark) for value in marks for mark in getattr(value, "elts", [value])):
        return True
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return all(any(map(is_released, node.decorator_list)) for node in found if node.name == (function or node.name))


def is_released(mark: ast.expr) -> bool:
    """Whether a mark is `release`, or parametrizes with cases that all are."""
    text = ast.unparse(mark)
    return text == "pytest.mark.release" or re.search(r"slow_but\(\[[^]]*\], every=\[\]\)", text) is not None


def test_the_marks_of_tests_are_read():
    assert only_before_a_release(
        "tests/faults/test_real_worker.py::test_nothing_outlives_a_launcher_killed_twenty_times"
    )
    assert is_released(ast.parse("pytest.mark.parametrize('kind', slow_but(['a', 'b'], every=[]))").body[0].value)
    assert not is_released(
        ast.parse("pytest.mark.parametrize('kind', slow_but(['a', 'b'], every=['a']))").body[0].value
    )


def test_the_page_has_the_table():
    text = faults.PAGE.read_text(encoding="utf-8")
    assert text.split(faults.BEGIN)[1].split(faults.END)[0] == faults.table(), "scripts/faults --table"


def test_other_arguments_are_refused(capsys):
    assert faults.main(["F99"]) == 2
    assert "scripts/faults [F1...]" in capsys.readouterr().err
