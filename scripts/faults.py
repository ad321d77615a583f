"""Run the tests of the faults of scripts/faults.yaml, or measure how fast they are noticed and survived.

    scripts/faults [F1...]              run their tests, slow ones too; exit code 1 if one fails
    scripts/faults --table              write the table of docs/reliability.md
    scripts/faults --measure N [F1...]  make each fault N times, keep its times in scripts/fault_times.yaml
    scripts/faults --storm              strike one tiny run with fifty faults, compare its end (--help: more options)

Everything happens in processes of its own on this machine, over the loopback interface.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

from fault_times import Times, keep_times, measure_strikes, measure_test, measured_where, read_times  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- scripts/faults --table -->\n", "<!-- end of the table -->\n"
LIMIT = 900  # seconds for the tests of one fault


@dataclass(frozen=True)
class Case:
    """A fault, and what happens.

    Attributes:
        reason: why no test proves it.
        release: why all of its tests run only before a release.
        strike: the kind of the storm's strikes whose times are its own.
        timed: else the test that records its times.
        untimed: else why it has none.
        limits: what its times depend on.
    """

    name: str
    fault: str
    happens: str = ""
    reason: str = ""
    release: str = ""
    tests: list[str] = field(default_factory=list)
    strike: str = ""
    timed: str = ""
    untimed: str = ""
    limits: str = ""


def cases() -> list[Case]:
    """Read the faults."""
    return [Case(**row) for row in yaml.safe_load((ROOT / "scripts" / "faults.yaml").read_text(encoding="utf-8"))]


def table() -> str:
    """Return the table of the page, and where its times were measured."""
    times, rows = read_times(), list[str]()
    for case in cases():
        taken = times.get(case.name, Times())
        noticed = case.untimed or taken.cell("noticed")
        later = "; ".join(f"{name} {taken.cell(name)}" for name in ("next step", "end") if name in taken.seconds)
        limits = f" ({case.limits})" if case.limits else ""
        happens = case.happens or f"**open**: {case.reason}"
        rows.append(f"| {case.name} | {case.fault} | {happens} | {noticed} | {later}{limits} |\n")
    head = "| case | fault | what happens | noticed: p50, p95 | next step or end: p50, p95 |\n"
    return "".join([head, "| --- | --- | --- | --- | --- |\n", *rows, f"\n{measured_where(times.values())}\n"])


def write_table() -> None:
    """Replace the table in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")


def run(names: Sequence[str]) -> int:
    """Run the tests of these faults (of all, without names), print a line for each, and return the exit code."""
    failed = False
    for case in cases():
        if names and case.name not in names:
            continue
        if not case.tests:
            print(f"{case.name:<4} open    {case.fault}: {case.reason}", flush=True)
            continue
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *case.tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        verdict = "passed" if done.returncode == 0 else "FAILED"
        failed = failed or done.returncode != 0
        print(f"{case.name:<4} {verdict}  {time.monotonic() - began:5.0f} s  {case.fault}: {case.happens}", flush=True)
        if done.returncode != 0:
            print(done.stdout[-2000:], flush=True)
    return int(failed)


def measure(names: Sequence[str], count: int) -> None:
    """Measure the times of these faults (of all, without names), keep them, and print p50 and p95."""
    chosen = [case for case in cases() if not names or case.name in names]

    def keep(measured: Mapping[str, Times]) -> None:
        keep_times(measured)
        for name, times in measured.items():
            shown = (f"{what} {times.cell(what)}" for what in times.seconds)
            print(f"{name:<4} p50, p95 of {count}: {'; '.join(shown)}", flush=True)

    if strikes := {case.name: case.strike for case in chosen if case.strike}:
        keep(measure_strikes(strikes, count))
    for case in chosen:
        if case.timed:
            keep({case.name: measure_test(case.timed, count)})


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments ask for; return the exit code."""
    known = {case.name for case in cases()}
    match list(arguments):
        case ["--table"]:
            write_table()
        case ["--measure", count, *names] if count.isdigit() and int(count) > 1 and known.issuperset(names):
            measure(names, int(count))
        case ["--storm", *options]:
            from fault_storm import main as storm

            return storm(options)
        case names if all(name in known for name in names):
            return run(names)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
