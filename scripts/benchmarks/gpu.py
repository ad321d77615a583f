"""Measure a GPU in one command: its ceilings, the kernels, training steps, the quickstart and the tests marked gpu.

Run it as `scripts/bench gpu --out DIR [--part K/N] [--only WORD...] [--seconds N]`. It needs torch, triton and what
megalaunch imports, and installs nothing: it runs in the first of $MEGALAUNCH_PYTHON, .venv and python3 that has them.
What a machine without network lacks is carried: `scripts/bench gpu_wheels` fills build/gpu_wheels, which is put on
PYTHONPATH. `--device cpu --small` runs everything with tiny shapes on a processor; its figures mean nothing.

The cases of a part share a process; each has a time limit. A case that would exceed --seconds is left out, and the
table says so: three commands with --part 1/3, 2/3 and 3/3 measure everything, and --merge joins their results. Results
are in DIR after every case: results.json, report.md, log.txt.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gpu_parts.parts import PARTS, START_SECONDS, Part, chosen_cases, share_of
from gpu_parts.report import report
from gpu_parts.setting import ROOT, Setting
from gpu_parts.worker import NEXT_PROCESS

_HERE = Path(__file__).resolve().parent
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
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        for part in parts:
            for row in _run_part(part, setting, log, ends):
                results.add([row])
                if "left_out" not in row:
                    state = "failed" if "failed" in row else f"{row['wall']:.1f} s"
                    print(f"{part.kind}: {row['case']}: {state}", flush=True)
    return results


def _run_part(part: Part, setting: Setting, log: TextIO, ends: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each case until the time `ends`.

    A case that ends its process or hangs is marked as failed, and the next ones get another process.
    """
    waiting = dict(part.cases)
    while waiting:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "rows.jsonl"
            yield from _run_process(part.kind, setting, waiting, out, log, ends)


def _run_process(
    kind: str, setting: Setting, waiting: dict[str, int], out: Path, log: TextIO, ends: float
) -> Iterator[dict[str, Any]]:
    """Run the cases that wait in one process, as far as it comes; yield their rows and remove them."""
    number, extra, process = 0, START_SECONDS, None
    try:
        while waiting:
            case, seconds = next(iter(waiting.items()))
            now = time.monotonic()
            if ends - now < seconds + extra:
                why = f"takes about {seconds + extra} s, and {max(0, ends - now):.0f} s are left"
                yield from ({"kind": kind, "case": case, "left_out": why} for case in waiting)
                waiting.clear()
                return
            process = process or _start(kind, setting, out, list(waiting), log)
            row = _next_row(out, number, process, min(ends, now + 2 * (seconds + extra) + _SPARE_SECONDS))
            if row is None and process.poll() == NEXT_PROCESS and number:
                return
            del waiting[case]
            if row is None:
                yield {"kind": kind, "case": case, "failed": _how_it_ended(process)}
                return
            yield row
            number, extra = number + 1, 0
    finally:
        if process is not None:  # also what it started: compilers, workers of the quickstart, tests
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(kind: str, setting: Setting, out: Path, cases: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start the process of some cases. What one compiles, later ones and later commands take from build/gpu_cache."""
    command = [sys.executable, "-m", "gpu_parts.worker", kind, json.dumps(setting.to_dict()), str(out), *cases]
    paths = [str(_HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build/gpu_cache/inductor"),
        "TRITON_CACHE_DIR": str(ROOT / "build/gpu_cache/triton"),
    }
    environment = {**caches, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print(f"== {kind}: {', '.join(cases)}", file=log, flush=True)
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


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
    versions = "import torch\ntry:\n import triton; t = triton.__version__\nexcept ImportError:\n t = 'missing'\n"
    facts.append(_output([sys.executable, "-c", versions + "print('torch', torch.__version__ + ', triton', t)"]))
    small = "; small mode on a processor: the figures mean nothing" if setting.small else ""
    return ", ".join(fact for fact in facts if fact) + small, card


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
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only cases whose 'kind: case' has one of these words"
    )
    parser.add_argument("--wheels", type=Path, help="folder that scripts/bench gpu_wheels filled (build/gpu_wheels)")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="measure share K of N of the cases")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="DIR", help="measure nothing: join the results of folders"
    )
    parser.add_argument("--seconds", type=float, default=520, help="time for all parts (520)")
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
        parts = chosen_cases(share_of(PARTS, *options.part), lambda name: _is_chosen(name, options.only))
        setting = Setting(options.device, options.small, compiles)
        results = measure(parts, setting, options.out, options.seconds)
    print("\n" + results.report())
    return 1 if any("failed" in row for row in results.rows) else 0


def _part(text: str) -> tuple[int, int]:
    """Read K/N."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, as 1/3")
    return int(number), int(of)


def _is_chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
