"""Collect the largest differences that parity tests measure, and write their rows of docs/reference/parity.md.

Every comparison with the one-process oracle calls `record`; `scripts/parity --proofs` runs those of the page. With
`pytest --proofs` any of them replaces its rows.
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
    """Write the rows of the tests that ran if --proofs was given and all tests passed."""
    if session.config.getoption("--proofs") and exitstatus == 0:
        PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), _found), encoding="utf-8")


def with_rows(page: str, found: Mapping[str, Proof]) -> str:
    """Return the page with a row for each test, in place of its earlier one; all other rows stay."""
    before, rest = page.split(BEGIN)
    rows, after = rest.split(END)
    by_layout = {row.split(" | ")[0].removeprefix("| "): f"{row}\n" for row in rows.removeprefix(HEAD).splitlines()}
    for test, p in found.items():
        measured = (p.gradients, p.norm, p.parameters, p.validation)
        by_layout[layout_of(test)] = f"| {layout_of(test)} | {' | '.join(f'{each:.1e}' for each in measured)} |\n"
    return before + BEGIN + HEAD + "".join(row for _, row in sorted(by_layout.items())) + END + after


def layout_of(test: str) -> str:
    """Turn a test id into a row name.

    `tests/.../test_pipeline_parallel.py::test_two_stages[1f1b]` -> `pipeline parallel: two stages, 1f1b`.
    """
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    parts = [Path(path).stem, name]
    room, title = (part.removeprefix("test_").replace("_", " ") for part in parts)
    return f"{room}: {title}{', ' + case.removesuffix(']').replace('|', ' ') if case else ''}"
