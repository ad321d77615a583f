"""What was skipped and why, in one place at the end: a missing reference must not look like a passed comparison.

A file that is skipped whole is never collected, and pytest-xdist passes nothing on of it: its workers send these names.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Skipped:
    """By reason: files that were skipped whole, and tests that were skipped one by one."""

    files: dict[str, set[str]] = field(default_factory=dict)
    tests: dict[str, set[str]] = field(default_factory=dict)

    def add(self, kind: str, reason: str, name: str) -> None:
        """Count a file or a test; twice the same is one."""
        getattr(self, kind).setdefault(reason, set()).add(name)

    def lines(self, tests_in: Mapping[str, int]) -> list[str]:
        """One a reason; a file counts as its test functions, of which each is at least one test."""
        found = []
        for reason in sorted({*self.files, *self.tests}):
            files, tests = self.files.get(reason, set()), self.tests.get(reason, set())
            if files:
                least = len(tests) + sum(tests_in[name] for name in files)
                found.append(f"at least {least} tests ({len(files)} whole files): {reason}")
            else:
                found.append(f"{len(tests)} tests: {reason}")
        return found


_skipped = Skipped()


def functions_of(path: Path) -> int:
    """How many test functions a file has."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that is skipped whole."""
    if report.skipped:
        _skipped.add("files", _reason(report), report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that is skipped; with pytest-xdist the reports of all workers come here."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.add("tests", _reason(report), report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its files to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped_files"] = {why: sorted(names) for why, names in _skipped.files.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist left out."""
    for reason, names in getattr(node, "workeroutput", {}).get("skipped_files", {}).items():
        for name in names:
            _skipped.add("files", reason, name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The list, where there is one."""
    names = {name for files in _skipped.files.values() for name in files}
    lines = _skipped.lines({name: functions_of(config.rootpath / name) for name in names})
    if lines:
        terminalreporter.section("NOT PROVEN HERE: skipped, for something is missing", sep="!", yellow=True, bold=True)
        for line in lines:
            terminalreporter.line(line, yellow=True)
