"""Start-up times of the commands that must feel instant, against their bars.

Run it as `scripts/bench startup [--runs N]`; exit 1 when a median misses its bar.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGALAUNCH = [sys.executable, str(Path(sys.executable).with_name("megalaunch"))]


def seconds(words: list[str], folder: str) -> float:
    """Wall time of one run of a command, which must succeed."""
    started = time.perf_counter()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed (exit {done.returncode}):\n{done.stderr or done.stdout}")
    return taken


def main() -> int:
    """Measure all commands in turns, so that a slow moment of the machine meets each of them."""
    parser = argparse.ArgumentParser(description="start-up times against their bars")
    parser.add_argument("--runs", type=int, default=15, help="runs of each command; the median counts (15)")
    runs = parser.parse_args().runs
    commands = {
        "megalaunch --help": [*MEGALAUNCH, "--help"],
        "megalaunch validate-config recipe=quickstart": [*MEGALAUNCH, "validate-config", "recipe=quickstart"],
        "megalaunch --version": [*MEGALAUNCH, "--version"],
        "scripts/run --version": [str(ROOT / "scripts" / "run"), "--version"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(runs + 1):
            for name, words in commands.items():
                taken = seconds(words, folder)
                if turn > 0:  # the first warms the file cache
                    times[name].append(taken)
    overhead = [with_run - plain for with_run, plain in zip(*list(times.values())[2:], strict=True)]
    rows = [
        ("megalaunch --help", times["megalaunch --help"], 0.25),
        ("megalaunch validate-config recipe=quickstart", times["megalaunch validate-config recipe=quickstart"], 0.6),
        ("scripts/run, on top of megalaunch", overhead, 0.1),
    ]
    print(f"{'seconds, ' + str(runs) + ' runs':46} {'median':>7} {'min':>7} {'max':>7} {'bar':>7}")
    missed = 0
    for name, taken, bar in rows:
        median = statistics.median(taken)
        missed += median >= bar
        verdict = "" if median < bar else "  missed"
        print(f"{name:46} {median:7.3f} {min(taken):7.3f} {max(taken):7.3f} {bar:7.3f}{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
