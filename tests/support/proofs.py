"""What the parity tests found, as the table of docs/parallelism.md: `scripts/parity --proofs` writes it.

Each comparison with the one-process oracle leaves its largest differences here, under the name of its test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- proofs: scripts/parity --proofs -->\n", "<!-- end of proofs -->\n"
HEAD = "| layout | gradients | norm | parameters | validation |\n| --- | --- | --- | --- | --- |\n"


@dataclass(frozen=True)
class Proof:
    """Largest relative differences from one process; of a gradient or parameter relative to its largest value."""

    gradients: float
    norm: float
    parameters: float
    validation: float


_found: dict[str, Proof] = {}


def record(proof: Proof) -> None:
    """Keep what the running test found."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    _found[test] = proof


def pytest_addoption(parser: pytest.Parser) -> None:
    """--proofs."""
    parser.addoption("--proofs", action="store_true", help=f"write what is found into docs/{PAGE.name}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Only when everything passed."""
    if session.config.getoption("--proofs") and exitstatus == 0:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + table(_found) + END + rest.split(END)[1], encoding="utf-8")


def table(found: Mapping[str, Proof]) -> str:
    """One row a test, those of one file together."""
    rows = (
        f"| {layout_of(test)} | {p.gradients:.1e} | {p.norm:.1e} | {p.parameters:.1e} | {p.validation:.1e} |\n"
        for test, p in sorted(found.items())
    )
    return HEAD + "".join(rows)


def layout_of(test: str) -> str:
    """`tests/.../test_pipeline_parallel.py::test_two_stages[1f1b]` -> `pipeline parallel: two stages, 1f1b`."""
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    words = [Path(path).stem, name]
    room, title = (word.removeprefix("test_").replace("_", " ") for word in words)
    return f"{room}: {title}{', ' + case.removesuffix(']').replace('|', ' ') if case else ''}"
