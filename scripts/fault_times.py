"""Measure the faults of scripts/faults.yaml: seconds until one is noticed, to the next step, to the end of the run.

The times of a fault are those of a strike of the storm (`strike`), or what one of its tests records (`timed`), by the
names NAMES, with pytest's `record_property`. They are kept in scripts/fault_times.yaml for the table of the page.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from xml.etree import ElementTree

import yaml
from struck_run import FEWEST_STEPS, MOST_STEPS, RANKS, Strike, StruckRun

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "scripts" / "fault_times.yaml"
NAMES = ("noticed", "next step", "end")
LIMIT = 900  # seconds for one run of a test, and for one strike

_HEAD = (
    "# Seconds that faults took, as `scripts/faults --measure N` has measured them; load: the load average before.\n"
)


@dataclass(frozen=True)
class Times:
    """The times of one fault in seconds, by name, and where and when they were taken."""

    cores: int = 0
    date: str = ""
    load: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def cell(self, name: str) -> str:
        """Return p50 and p95 of the times of one name, or nothing."""
        if name not in self.seconds:
            return ""
        p50, p95 = percentiles(self.seconds[name])
        digits = 1 if p95 >= 0.1 else 3
        return f"{p50:.{digits}f} s, {p95:.{digits}f} s"


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p95."""
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 19
    return cuts[9], cuts[18]


def read_times() -> dict[str, Times]:
    """Return the times that were measured last, by the name of the fault."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {name: Times(**row) for name, row in rows.items()}


def keep_times(measured: Mapping[str, Times]) -> None:
    """Put the times of these faults in place of older ones."""
    rows = {**read_times(), **measured}
    ordered = {name: dataclasses.asdict(rows[name]) for name in sorted(rows, key=lambda name: int(name[1:]))}
    text = yaml.safe_dump(ordered, default_flow_style=None, sort_keys=False, width=120)
    FILE.write_text(_HEAD + text, encoding="utf-8")


def measure_strikes(kinds: Mapping[str, str], count: int) -> dict[str, Times]:
    """Strike one run with faults of each kind, in random order.

    Args:
        kinds: the kind of the storm's strike, by the name of the fault.
        count: strikes of each kind.
    """
    source, load = random.Random(count), os.getloadavg()[0]
    names = [name for name in kinds for _ in range(count)]
    source.shuffle(names)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        struck = StruckRun(Path(folder), Path(folder) / "shared", LIMIT + 60.0 * len(names))
        try:
            struck.launch(async_save=False)
            for name in names:
                steps = source.randint(FEWEST_STEPS.get(kinds[name], 1), MOST_STEPS)
                strike = Strike(kinds[name], source.randrange(RANKS), steps, source.random(), async_save=False)
                result = struck.strike(strike, wait=True)
                for what, taken in (("noticed", result.noticed), ("next step", result.next_step)):
                    if taken is not None:
                        seconds[name].setdefault(what, []).append(taken)
        finally:
            struck.close()
    return {name: _taken_here(load, found) for name, found in seconds.items()}


def measure_test(test: str, count: int) -> Times:
    """Run a test again and again, and return the times that it records. Raises if it fails or records none."""
    load, seconds = os.getloadavg()[0], dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not gpu", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, test]
        for _ in range(count):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
            found = recorded_times(report) if done.returncode == 0 else {}
            if not found:
                raise RuntimeError(f"{test} recorded no times: {done.stdout[-2000:]}{done.stderr[-500:]}")
            for name, taken in found.items():
                seconds.setdefault(name, []).append(taken)
    return _taken_here(load, seconds)


def recorded_times(report: Path) -> dict[str, float]:
    """Return the times that a test has recorded, from pytest's report in JUnit's format."""
    properties = ElementTree.parse(report).iter("property")
    return {item.attrib["name"]: float(item.attrib["value"]) for item in properties if item.attrib["name"] in NAMES}


def measured_where(times: Iterable[Times]) -> str:
    """Return a sentence on machines, dates and load."""
    found = list(times)
    cores, dates = sorted({each.cores for each in found}), sorted({each.date for each in found})
    loads = [each.load for each in found]
    on = " or ".join(map(str, cores))
    when = _span(dates)
    counts = sorted({len(taken) for each in found for taken in each.seconds.values()})
    return (
        f"Measured with recipe=tiny on {on} cores, {when}, at a load average of {min(loads):.0f} to {max(loads):.0f}, "
        f"{_span(counts)} times each."
    )


def _span(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _taken_here(load: float, seconds: Mapping[str, Sequence[float]]) -> Times:
    rounded = {name: [round(each, 4) for each in seconds[name]] for name in NAMES if name in seconds}
    return Times(os.cpu_count() or 1, datetime.date.today().isoformat(), round(load, 1), rounded)
