"""Measure a GPU in one command: its ceilings, the kernels, training steps, the quickstart and the tests marked gpu.

Run it as `scripts/bench gpu --out DIR [--only WORD...] [--seconds N]`. It needs torch, triton and what megalaunch
imports, and installs nothing: it runs in the first of $MEGALAUNCH_PYTHON, .venv and python3 that has them. What a
machine without network lacks is carried: `scripts/bench gpu_wheels` fills build/gpu_wheels, which is put on PYTHONPATH.
`--device cpu --small` runs everything with tiny shapes on a processor; its figures mean nothing.

Every part is a process of its own with a time limit; a part that would exceed --seconds is left out, and the table says
so. Results are in DIR after every case: results.json, report.md, log.txt.
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

from gpu_parts.report import report
from gpu_parts.setting import Setting

_HERE = Path(__file__).resolve().parent
_CEILINGS = (
    "bf16 matmul",
    "bf16 matmul, MLP of 1B",
    "bf16 matmul, MLP of 8B",
    "fp8 matmul, scale of the tensor",
    "fp8 matmul, scale of each row",
    "memory copy",
)
_KERNELS = (
    "attention, head 64",
    "attention, head 128",
    "attention, documents",
    "linear and cross-entropy",
    "RMSNorm",
    "residual and RMSNorm",
    "SwiGLU",
    "GEGLU, tanh",
    "rope",
    "fp8 linear, tensorwise",
    "fp8 linear, rowwise",
    "fp8 linear, blockwise",
    "fp8 cast, 1 x 128",
    "fp8 cast, 128 x 128",
    "fp8 cast, mxfp8",
    "fp8 cast, delayed, both layouts",
    "grouped linear",
    "fp8 grouped linear, rowwise",
    "fp8 grouped linear, blockwise",
    "permute and unpermute",
    "AdamW",
    "gradient norm",
    "LayerNorm",
)
_1B, _8B, _8B_8L = "Llama-3.2-1B", "8B shape, 4 layers", "8B shape, 8 layers"
_GPT2, _QWEN3 = "GPT-2 124M", "Qwen3-30B-A3B shape, 2 layers"


@dataclass(frozen=True)
class Part:
    """Cases of one kind that share a process; `seconds` is what they are expected to take on a GPU."""

    kind: str
    cases: tuple[str, ...]
    seconds: int

    @property
    def limit(self) -> int:
        """Seconds after which the process is stopped."""
        return 2 * self.seconds + 30


def _train(model: str, sequence: int, setting: str, seconds: int, kind: str = "training") -> Part:
    return Part(kind, (f"{model}, {sequence}, {setting}",), seconds)


# The most telling first, as time may end.
PARTS = (
    Part("ceilings", _CEILINGS, 20),
    _train(_8B, 8192, "bf16", 35),
    _train(_1B, 8192, "bf16", 40),
    _train(_8B, 8192, "fp8", 45),
    Part("kernels", _KERNELS, 90),
    _train(_8B, 8192, "bf16", 50, "transformers"),
    Part("checks", ("gpu tests",), 60),
    Part("checks", ("quickstart",), 30),
    _train(_1B, 8192, "bf16", 55, "transformers"),
    _train(_QWEN3, 8192, "bf16", 45),
    _train(_8B_8L, 8192, "bf16", 45),
    _train(_GPT2, 2048, "bf16", 35),
    _train(_GPT2, 2048, "bf16, graphs", 35),
    _train(_1B, 2048, "bf16", 35),
    _train(_8B, 2048, "bf16", 35),
    _train(_1B, 8192, "fp8", 45),
    _train(_8B_8L, 8192, "fp8", 45),
    _train(_QWEN3, 2048, "bf16", 45),
    _train(_GPT2, 2048, "bf16", 40, "transformers"),
    _train(_QWEN3, 8192, "bf16", 60, "transformers"),
    _train(_8B_8L, 2048, "bf16", 40),
    _train(_GPT2, 8192, "bf16", 40),
    _train(_1B, 2048, "fp8", 40),
    _train(_8B, 2048, "fp8", 40),
    _train(_8B_8L, 2048, "fp8", 40),
    _train(_GPT2, 2048, "fp8", 40),
    _train(_GPT2, 8192, "fp8", 40),
    _train(_QWEN3, 8192, "fp8", 45),
    _train(_QWEN3, 2048, "fp8", 45),
    _train(_8B, 2048, "bf16", 50, "transformers"),
    _train(_1B, 2048, "bf16", 50, "transformers"),
)


@dataclass
class Results:
    """The results so far, written to the folder after every change."""

    folder: Path
    machine: str
    rows: list[dict[str, Any]]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows and write the files."""
        self.rows += rows
        content = json.dumps({"machine": self.machine, "results": self.rows}, indent=1)
        (self.folder / "results.json").write_text(content, encoding="utf-8")
        (self.folder / "report.md").write_text(report(self.rows, self.machine) + "\n", encoding="utf-8")


def measure(parts: Sequence[Part], setting: Setting, folder: Path, seconds: float) -> Results:
    """Run the parts one after another within `seconds`, and print a line for each."""
    ends = time.monotonic() + seconds
    results = Results(folder, _machine(setting), [])
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        for part in parts:
            left = ends - time.monotonic()
            if left < part.seconds:
                why = f"takes about {part.seconds} s, and {max(0, left):.0f} s are left"
                results.add([{"kind": part.kind, "case": case, "left_out": why} for case in part.cases])
                continue
            for row in _run_part(part, setting, log, left):
                results.add([row])
                state = "failed" if "failed" in row else f"{row['wall']:.1f} s"
                print(f"{part.kind}: {row['case']}: {state}", flush=True)
    return results


def _run_part(part: Part, setting: Setting, log: TextIO, left: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each case. A case that ends its process is marked, and the next ones get another process."""
    ends = time.monotonic() + min(left, part.limit)
    cases = list(part.cases)
    while cases:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "rows.jsonl"
            code = _run_process(part.kind, setting, out, cases, log, ends - time.monotonic())
            rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
        yield from rows
        cases = cases[len(rows) :]
        if cases:
            why = "stopped at its time limit" if code is None else f"the process ended with {code}; see log.txt"
            yield {"kind": part.kind, "case": cases.pop(0), "failed": why}
        if code is None:
            yield from ({"kind": part.kind, "case": case, "left_out": "no time was left"} for case in cases)
            return


def _run_process(
    kind: str, setting: Setting, out: Path, cases: Sequence[str], log: TextIO, seconds: float
) -> int | None:
    """Run cases in a process; return its exit code, None if it was stopped after `seconds`."""
    command = [sys.executable, "-m", "gpu_parts.worker", kind, json.dumps(setting.to_dict()), str(out), *cases]
    paths = [str(_HERE), str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print(f"== {kind}: {', '.join(cases)}", file=log, flush=True)
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also what it started: compilers, workers of the quickstart, tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _machine(setting: Setting) -> str:
    """Return date, commit, card, driver and versions in one line."""
    facts = [
        time.strftime("%Y-%m-%d", time.gmtime()),
        _output(["git", "-C", str(_HERE), "rev-parse", "--short", "HEAD"]),
    ]
    if setting.device == "cuda":
        facts.append(_output(["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]))
    versions = "import torch\ntry:\n import triton; t = triton.__version__\nexcept ImportError:\n t = 'missing'\n"
    facts.append(_output([sys.executable, "-c", versions + "print('torch', torch.__version__ + ', triton', t)"]))
    small = "; small mode on a processor: the figures mean nothing" if setting.small else ""
    return ", ".join(fact for fact in facts if fact) + small


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
    parser.add_argument("--seconds", type=float, default=520, help="time for all parts (520)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes: to try the benchmark itself")
    parser.add_argument("--compile", choices=("yes", "no"), help="use torch.compile (yes; in the small mode no)")
    options = parser.parse_args(arguments)
    compiles = not options.small if options.compile is None else options.compile == "yes"
    setting = Setting(options.device, options.small, compiles)
    parts = [
        Part(part.kind, chosen, part.seconds)
        for part in PARTS
        if (chosen := tuple(case for case in part.cases if _is_chosen(f"{part.kind}: {case}", options.only)))
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    results = measure(parts, setting, options.out, options.seconds)
    print("\n" + report(results.rows, results.machine))
    return 1 if any("failed" in row for row in results.rows) else 0


def _is_chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
