"""Measure a GPU in one command: its ceilings, the kernels, training steps, the quickstart and the tests marked gpu.

Run it as `scripts/bench gpu --out DIR [--all [--part K/N]] [--only WORD...] [--seconds N]`. It needs torch, triton and
what megalaunch imports, and installs nothing: it runs in the first of $MEGALAUNCH_PYTHON, .venv and python3 that has
them. What a machine without network lacks is carried: `scripts/bench gpu_wheels` fills build/gpu_wheels, which is put
on PYTHONPATH. `--device cpu --small` runs everything with tiny shapes on a processor; its figures mean nothing.

First, while the quickstart and the tests run, several processes compile what the cases need; then the cases are timed
one after another. Each has a time limit. A case that would exceed --seconds is left out: the report names it and the
command that measures it, and --merge joins the results. --all adds variants, in two commands with --part 1/2
and 2/2. Results are in DIR after every case: results.json, report.md, log.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from gpu_parts.parts import (
    AHEAD_PROCESSES,
    CHECKS,
    EXTRA,
    PARTS,
    Part,
    chosen_cases,
    joined,
    plan_ahead,
    share_of,
    with_profiles,
)
from gpu_parts.report import report
from gpu_parts.setting import ROOT, Setting
from gpu_parts.worker import NEXT_PROCESS

_HERE = Path(__file__).resolve().parent
SECONDS = 520  # of the nine minutes of a command; the rest is for its start and its end
_SPARE_SECONDS = 60  # beyond twice what a case is expected to take, after which it is stopped


@dataclass
class Results:
    """The results so far, written to the folder after every change."""

    folder: Path
    machine: str
    card: str
    rows: list[dict[str, Any]]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows and write the files."""
        self.rows += rows
        content = json.dumps({"machine": self.machine, "card": self.card, "results": self.rows}, indent=1)
        (self.folder / "results.json").write_text(content, encoding="utf-8")
        (self.folder / "report.md").write_text(self.report() + "\n", encoding="utf-8")

    def report(self) -> str:
        """Return the tables."""
        return report(self.rows, self.machine, self.card)


def measure(parts: Sequence[Part], setting: Setting, folder: Path, seconds: float) -> Results:
    """Run the parts one after another within `seconds`, and print a line for each case."""
    ends = time.monotonic() + seconds
    results = Results(folder, *_machine(setting), [])
    with open(folder / "log.txt", "w", encoding="utf-8") as log, _Ahead(parts, setting, log, ends) as ahead:
        for part in joined(parts):
            if part.process != CHECKS:
                ahead.wait()
            for row in _run_part(part, part.seconds(ahead.is_used), setting, log, ends):
                results.add([row])
                if "left_out" not in row:
                    why = next((word for word in ("failed", "unsupported") if word in row), "")
                    state = why or f"{row['wall']:.1f} s"
                    print(f"{row['kind']}: {row['case']}: {state}", flush=True)
    return results


class _Ahead(contextlib.ExitStack):
    """Processes that compile what the cases need, before anything is timed. A case that fails there does in its run."""

    def __init__(self, parts: Sequence[Part], setting: Setting, log: TextIO, ends: float) -> None:
        super().__init__()
        processes = max(1, min(AHEAD_PROCESSES, (os.cpu_count() or 1) // 4))
        plan = plan_ahead(parts, processes)
        self._started = time.monotonic()
        self.is_used = setting.compile and bool(plan.shares) and 2 * plan.seconds < ends - self._started
        self._ends, self._processes = min(ends, self._started + 2 * plan.seconds), []
        if not self.is_used:
            return
        scratch = Path(self.enter_context(tempfile.TemporaryDirectory()))
        for number, names in enumerate(plan.shares):
            process = _start(replace(setting, ahead=True), scratch / f"{number}.jsonl", names, log)
            self.callback(_stop, process)
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until everything is compiled, at most twice the expected time."""
        if not self._processes:
            return
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._ends - time.monotonic()))
        self.close()
        self._processes = []
        print(f"compiled ahead: {time.monotonic() - self._started:.1f} s", flush=True)


def _run_part(
    part: Part, seconds: dict[str, float], setting: Setting, log: TextIO, ends: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case until the time `ends`.

    A case that ends its process or hangs is marked as failed, and the next ones get another process.
    """
    waiting = dict(seconds)
    while waiting:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "rows.jsonl"
            yield from _run_process(part.start, setting, waiting, out, log, ends)


def _run_process(
    start: float, setting: Setting, waiting: dict[str, float], out: Path, log: TextIO, ends: float
) -> Iterator[dict[str, Any]]:
    """Run the cases that wait in one process, as far as it comes; yield their rows and remove them."""
    number, extra, process = 0, start, None
    try:
        while waiting:
            name, seconds = next(iter(waiting.items()))
            now = time.monotonic()
            if ends - now < seconds + extra:
                takes, left = f"{seconds + extra:.0f} s", f"{max(0.0, ends - now):.0f} s"
                why = f"{name.partition(': ')[2]} takes about {takes}, and {left} are left"
                yield from (_row(each, "left_out", why) for each in waiting)
                waiting.clear()
                return
            process = process or _start(setting, out, list(waiting), log)
            row = _next_row(out, number, process, min(ends, now + 2 * (seconds + extra) + _SPARE_SECONDS))
            if row is None and process.poll() == NEXT_PROCESS and number:
                return
            del waiting[name]
            if row is None:
                yield _row(name, "failed", _how_it_ended(process))
                return
            yield row
            number, extra = number + 1, 0.0
    finally:
        if process is not None:
            _stop(process)


def _row(name: str, state: str, why: str) -> dict[str, Any]:
    kind, _, case = name.partition(": ")
    return {"kind": kind, "case": case, state: why}


def _start(setting: Setting, out: Path, names: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start the process of some cases. What one compiles, later ones and later commands take from build/gpu_cache."""
    command = [sys.executable, "-m", "gpu_parts.worker", json.dumps(setting.to_dict()), str(out), *names]
    paths = [str(_HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build/gpu_cache/inductor"),
        "TRITON_CACHE_DIR": str(ROOT / "build/gpu_cache/triton"),
    }
    environment = {**caches, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print(f"== {'ahead: ' if setting.ahead else ''}{'; '.join(names)}", file=log, flush=True)
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process with what it started: compilers, workers of the quickstart, tests."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _next_row(out: Path, number: int, process: subprocess.Popen[bytes], ends: float) -> dict[str, Any] | None:
    """Wait for line `number` of a file; return its row, None if the process ends without it or the time is over."""
    while True:
        running = process.poll() is None  # before the file is read: what it wrote last is then there
        lines = out.read_text(encoding="utf-8").splitlines(keepends=True) if out.is_file() else []
        if len(lines) > number and lines[number].endswith("\n"):
            row: dict[str, Any] = json.loads(lines[number])
            return row
        if not running or time.monotonic() > ends:
            return None
        time.sleep(0.05)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    return "stopped at its time limit" if code is None else f"the process ended with {code}; see log.txt"


def merge(folders: Sequence[Path], out: Path) -> Results:
    """Write the results of several commands as those of one. Of a case that several have, the best row counts.

    A measured row is better than one that failed, and both than one that was left out; of equals the later counts.
    """
    read = [json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in folders]
    if len(cards := {one["card"] for one in read}) > 1:
        raise ValueError(f"these are results of several cards: {', '.join(sorted(cards))}; merge those of each alone")
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for one in read for row in one["results"]):
        key = row["kind"], row["case"]
        if key not in best or _worth(row) >= _worth(best[key]):
            best[key] = row
    results = Results(out, "\n".join(dict.fromkeys(one["machine"] for one in read)), read[0]["card"], [])
    results.add(list(best.values()))
    return results


def _worth(row: dict[str, Any]) -> int:
    return 0 if "left_out" in row else 1 if "failed" in row else 2


def _machine(setting: Setting) -> tuple[str, str]:
    """Return date, commit, card, driver and versions in one line, and the card's name ("" on a processor)."""
    facts = [
        time.strftime("%Y-%m-%d", time.gmtime()),
        _output(["git", "-C", str(_HERE), "rev-parse", "--short", "HEAD"]),
    ]
    card = ""
    if setting.device == "cuda":
        facts.append(_output(["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]))
        card = facts[-1].splitlines()[0].split(",")[0] if facts[-1] else ""
    facts.append(", ".join(f"{name} {_version(name)}" for name in ("torch", "triton")))
    small = "; small mode on a processor: the figures mean nothing" if setting.small else ""
    return ", ".join(fact for fact in facts if fact) + small, card


def _version(name: str) -> str:
    """Return the version of a package without importing it, which takes seconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _output(command: Sequence[str]) -> str:
    """Return what a command prints; nothing if it fails: a copied checkout has no repository."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench gpu", description="measure a GPU in one command", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json, report.md and log.txt")
    parser.add_argument("--all", action="store_true", help="measure variants too: takes more than --seconds")
    parser.add_argument("--part", type=_part, metavar="K/N", help="measure share K of N of all cases")
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only those of all cases whose 'kind: case' has one of these words"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="DIR", help="measure nothing: join the results of folders"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all parts ({SECONDS})")
    parser.add_argument("--profile", action="store_true", help="profile one more step of each training case (5 s each)")
    parser.add_argument("--wheels", type=Path, help="folder that scripts/bench gpu_wheels filled (build/gpu_wheels)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes: to try the benchmark itself")
    parser.add_argument("--compile", choices=("yes", "no"), help="use torch.compile (yes; in the small mode no)")
    options = parser.parse_args(arguments)
    if lacking := [str(folder) for folder in options.merge if not (folder / "results.json").is_file()]:
        parser.error(f"no results.json in {', '.join(lacking)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.merge:
        try:
            results = merge(options.merge, options.out)
        except ValueError as problem:
            parser.error(str(problem))
    else:
        compiles = not options.small if options.compile is None else options.compile == "yes"
        parts = selected(options.only, options.all, options.part)
        setting = Setting(options.device, options.small, compiles, options.profile)
        results = measure(with_profiles(parts) if options.profile else parts, setting, options.out, options.seconds)
        if not (options.only or options.all or options.part):
            extra = (name for part in PARTS for name in part.cases if name in EXTRA)
            results.add([_row(name, "left_out", "measured with --all") for name in extra])
    print("\n" + results.report())
    return 1 if any("failed" in row for row in results.rows) else 0


def selected(only: Sequence[str], everything: bool, part: tuple[int, int] | None) -> list[Part]:
    """Return what a command measures: all cases if it names a share or words, else those that tell most."""
    parts = list(PARTS) if part is None else share_of(PARTS, *part)
    if only:
        return chosen_cases(parts, lambda name: any(word in name for word in only))
    return parts if everything or part else chosen_cases(parts, lambda name: name not in EXTRA)


def _part(text: str) -> tuple[int, int]:
    """Read K/N."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, as 1/3")
    return int(number), int(of)


if __name__ == "__main__":
    sys.exit(main())
