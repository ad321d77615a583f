"""Start-up times of the commands that must feel instant, against their bars.

Run it as `scripts/bench startup [--runs N]`; exit 1 when a median misses its bar. The bars are for a machine that does
nothing else; the processor's time beside them says what other work on it has added.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGALAUNCH = [sys.executable, str(Path(sys.executable).with_name("megalaunch"))]


def seconds(command: list[str], folder: str, environment: Mapping[str, str]) -> tuple[float, float]:
    """Wall and processor time of one run of a command, which must succeed."""
    started, used = time.perf_counter(), _processor_seconds()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | dict(environment), capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed (exit {done.returncode}):\n{done.stderr or done.stdout}")
    return taken, _processor_seconds() - used


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


SHELL = {"_MEGALAUNCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "megalaunch train recipe=ll"}
LAYOUT = ["parallel=tp4pp4", "cluster.nodes=2", "cluster.devices_per_node=8"]
ROWS: dict[str, tuple[list[str], float | None]] = {
    # what is timed: its arguments after `megalaunch`, and its bar in seconds
    "megalaunch --version": (["--version"], None),
    "megalaunch --help": (["--help"], 0.25),
    "TAB after train recipe=ll": ([], 0.3),
    "validate-config recipe=quickstart": (["validate-config", "recipe=quickstart"], 0.6),
    "validate-config recipe=llama3_8b parallel=tp4pp4": (["validate-config", "recipe=llama3_8b", *LAYOUT], 0.6),
    "validate-config recipe=deepseek_v3": (["validate-config", "recipe=deepseek_v3"], 0.6),
    "plan recipe=llama3_8b parallel=tp4pp4": (["plan", "recipe=llama3_8b", *LAYOUT], 0.8),
    "plan recipe=deepseek_v3": (["plan", "recipe=deepseek_v3"], 0.8),
}


def main() -> int:
    """Measure all commands in turns, so that a slow moment of the machine meets each of them."""
    parser = argparse.ArgumentParser(description="start-up times against their bars")
    parser.add_argument("--runs", type=int, default=15, help="runs of each command; the median counts (15)")
    runs = parser.parse_args().runs
    commands = {name: [*MEGALAUNCH, *arguments] for name, (arguments, _) in ROWS.items()}
    commands["scripts/run --version"] = [str(ROOT / "scripts" / "run"), "--version"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    processor: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(runs + 1):
            for name, arguments in commands.items():
                taken, used = seconds(arguments, folder, SHELL if name.startswith("TAB") else {})
                if turn > 0:  # the first warms the file cache
                    times[name].append(taken)
                    processor[name].append(used)
    plain = times["megalaunch --version"]
    overhead = [with_run - without for with_run, without in zip(times["scripts/run --version"], plain, strict=True)]
    rows = [(name, times[name], bar, processor[name]) for name, (_, bar) in ROWS.items() if bar is not None]
    rows.append(("scripts/run, on top of megalaunch", overhead, 0.1, []))
    print(f"{'seconds, ' + str(runs) + ' runs':50} {'median':>7} {'min':>7} {'max':>7} {'cpu':>7} {'bar':>7}")
    missed = 0
    for name, taken, bar, used_by in rows:
        median = statistics.median(taken)
        missed += median >= bar
        verdict = "" if median < bar else "  missed"
        cpu = f"{statistics.median(used_by):7.3f}" if used_by else " " * 7
        print(f"{name:50} {median:7.3f} {min(taken):7.3f} {max(taken):7.3f} {cpu} {bar:7.3f}{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
