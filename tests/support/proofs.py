"""Collect the largest differences that parity tests measure, and write the table of docs/reference/parity.md.

Every comparison with the one-process oracle calls `record`; `scripts/parity --proofs` writes the page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "reference" / "parity.md"
BEGIN, END = "<!-- proofs: scripts/parity --proofs -->\n", "<!-- end of proofs -->\n"
HEAD = "| layout | gradients | norm | parameters | validation |\n| --- | --- | --- | --- | --- |\n"


@dataclass(frozen=True)
class Proof:
    """Largest relative differences from one process; for a tensor, relative to its largest value."""

    gradients: float
    norm: float
    parameters: float
    validation: float


_found: dict[str, Proof] = {}


def record(proof: Proof) -> None:
    """Record the differences that the running test measured."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    _found[test] = proof


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --proofs."""
    parser.addoption("--proofs", action="store_true", help=f"write the differences to {PAGE.relative_to(ROOT)}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table if --proofs was given and all tests passed."""
    if session.config.getoption("--proofs") and exitstatus == 0:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + table(_found) + END + rest.split(END)[1], encoding="utf-8")


def table(found: Mapping[str, Proof]) -> str:
    """Return the table: one row per test, sorted by file."""
    rows = (
        f"| {layout_of(test)} | {p.gradients:.1e} | {p.norm:.1e} | {p.parameters:.1e} | {p.validation:.1e} |\n"
        for test, p in sorted(found.items())
    )
    return HEAD + "".join(rows)


def layout_of(test: str) -> str:
    """Turn a test id into a row name.

    `tests/.../test_pipeline_parallel.py::test_two_stages[1f1b]` -> `pipeline parallel: two stages, 1f1b`.
    """
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    parts = [Path(path).stem, name]
    room, title = (part.removeprefix("test_").replace("_", " ") for part in parts)
    return f"{room}: {title}{', ' + case.removesuffix(']').replace('|', ' ') if case else ''}"
