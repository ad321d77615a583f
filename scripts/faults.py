"""Run the tests of the faults of scripts/faults.yaml, or measure how fast a crash and a hang are found.

    scripts/faults [F1...]         run their tests, slow ones too; exit code 1 if one fails
    scripts/faults --table         write the table of docs/reliability.md
    scripts/faults --measure N     kill a worker N times in a tiny run, stop one N times in another; print p50 and p95
    scripts/faults --storm         strike one tiny run with fifty faults, and compare its end (--help: more options)

Everything happens in processes of its own on this machine, over the loopback interface.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- scripts/faults --table -->\n", "<!-- end of the table -->\n"
LIMIT = 900  # seconds for the tests of one fault


@dataclass(frozen=True)
class Case:
    """A fault, and what happens; `reason` says why no test proves it, `release` why all of them take a release."""

    name: str
    fault: str
    happens: str = ""
    reason: str = ""
    release: str = ""
    tests: list[str] = field(default_factory=list)


def cases() -> list[Case]:
    """Read the faults."""
    return [Case(**row) for row in yaml.safe_load((ROOT / "scripts" / "faults.yaml").read_text(encoding="utf-8"))]


def table() -> str:
    """Return the table of the page."""
    rows = [f"| {case.name} | {case.fault} | {case.happens or f'**open**: {case.reason}'} |\n" for case in cases()]
    return "".join(["| case | fault | what happens |\n", "| --- | --- | --- |\n", *rows])


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


def measure(times: int) -> None:
    """Kill a worker `times` times, then stop one as often; print how long it took to notice and to train again."""
    from fault_storm import percentiles

    for number, name in ((signal.SIGKILL, "crash"), (signal.SIGSTOP, "hang")):
        with tempfile.TemporaryDirectory() as folder:
            found = strike(Path(folder), number, times)
        for index, what in enumerate((f"{name} noticed", f"{name} to the next step")):
            seconds = [pair[index] for pair in found]
            p50, p95 = percentiles(seconds)
            print(f"{what:<24} p50 {p50:5.1f} s  p95 {p95:5.1f} s  max {max(seconds):5.1f} s  n {times}", flush=True)


def strike(folder: Path, number: signal.Signals, times: int) -> list[tuple[float, float]]:
    """Send a signal to rank 1 of a tiny run again and again: (seconds until noticed, until a new step) of each."""
    from launching import events_of, steps_of, wait_until
    from training import training

    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import read_progress

    directory, found = RunDirectory(folder / "run"), list[tuple[float, float]]()
    with training(folder, "train.steps=100000", "launcher.max_restarts=3", "launcher.restart_backoff=0"):
        for strikes in range(times):
            first = max(steps_of(directory), default=0)
            wait_until(lambda: max(steps_of(directory), default=0) > first + 30, 120)  # noqa: B023
            progress = read_progress(directory.progress(1))
            assert progress is not None, "it has trained"
            began = time.monotonic()
            os.kill(progress.pid, number)
            wait_until(lambda: len(events_of(directory, "worker_failed")) > strikes, 120)  # noqa: B023
            noticed = time.monotonic() - began
            wait_until(lambda: len(events_of(directory, "resumed")) > strikes, 120)  # noqa: B023
            resumed = max(steps_of(directory), default=0)
            wait_until(lambda: max(steps_of(directory), default=0) > resumed, 120)  # noqa: B023
            found.append((noticed, time.monotonic() - began))
    return found


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments ask for; return the exit code."""
    known = {case.name for case in cases()}
    match list(arguments):
        case ["--table"]:
            write_table()
        case ["--measure", count] if count.isdigit() and int(count) > 1:
            measure(int(count))
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
