"""scripts/test --matrix: megalaunch under several versions of Python and torch, each in an environment of its own.

In each environment: install the wheel, train the recipe quickstart for a few steps outside the checkout, run a part of
the parity tests, and resume the runs that the other environments began. Prints a table in Markdown; what this machine
cannot have is a row "not run" with the reason, and only a failure makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/matrix"
NEWEST = "newest"
PAIRS = ("3.11:2.11", "3.12:2.13", f"3.13:{NEWEST}")
"""Python and torch: the oldest of both, the Python between, the newest of both."""
PARITY = (
    "tests/engine/parallel/test_tensor_parallel.py",
    "tests/engine/parallel/test_pipeline_parallel.py",
    "tests/engine/parallel/test_data_parallel.py",
    "tests/engine/parallel/test_communication.py",
    "tests/engine/simulate/test_deep_plan.py",
    "tests/engine/checkpoint/test_resharding.py",
)
TRAIN = (
    *(f"data.corpus={FOLDER / 'corpus'}", f"data.cache_directory={FOLDER / 'cache'}", "tokenizer.vocab_size=4096"),
    *("recipe=quickstart", "train.steps=6", "train.validation_interval=6", "checkpoint.interval=3"),
    *(
        "precision.compute_dtype=fp32",
        "launcher.restart_backoff=0",
        "train.sample_prompt=null",
        "batch.sequence_length=64",
    ),
)
BY_TORCH = ("torch", "triton", "nvidia", "cuda", "sympy", "networkx", "setuptools")
"""Beginnings of the packages whose versions a version of torch decides, not constraints.txt."""
RESUMED_STEP, LAST_STEP = 3, 6
TOLERANCE = 1e-5  # of a loss, between two versions of torch in fp32


class CannotHave(Exception):
    """The machine or the registry lacks a version; the text is the reason."""


@dataclass
class Cell:
    """One environment and its results; a result that is not there yet is an empty text."""

    python: str
    torch: str
    installed: str = ""
    trained: str = ""
    parity: str = ""
    read: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def folder(self) -> Path:
        """Of its environment, logs and run."""
        return FOLDER / f"python{self.python}-torch{self.torch}"

    @property
    def run(self) -> Path:
        """The run that it trains, and that the others resume."""
        return self.folder / "runs/quickstart"


def main() -> int:
    """Run the matrix; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="scripts/test --matrix", description=__doc__)
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="PYTHON:TORCH", help=f"default: {' '.join(PAIRS)}")
    cells = [Cell(*pair.split(":")) for pair in parser.parse_args().pairs]
    shutil.rmtree(FOLDER, ignore_errors=True)
    copy_corpus()
    wheel = build_wheel()
    for cell in cells:
        say(f"Python {cell.python}, torch {cell.torch}")
        try:
            install(cell, wheel)
        except CannotHave as error:
            cell.reason = str(error)
            say(f"not run: {error}")
            continue
        train(cell)
        run_parity(cell)
    trained = [cell for cell in cells if cell.trained == "passed"]
    for reader in trained:
        for writer in trained:
            if reader is not writer:
                resume(reader, writer)
    print(table(cells))
    for cell in cells:
        for failure in cell.failures:
            print(f"failed: Python {cell.python}, torch {cell.torch}: {failure}", file=sys.stderr)
    return int(any(cell.failures for cell in cells))


def copy_corpus() -> None:
    """Keep the text to train on: the pages of the documentation as they are now."""
    (FOLDER / "corpus").mkdir(parents=True)
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, FOLDER / "corpus" / f"{page.stem}.txt")


def build_wheel() -> Path:
    """Build the wheel of this checkout."""
    done = call([uv(), "build", "--quiet", "--wheel", "--out-dir", FOLDER / "dist", ROOT], ROOT, FOLDER / "build.log")
    if done:
        sys.exit(f"the wheel was not built: see {FOLDER / 'build.log'}")
    return next((FOLDER / "dist").glob("*.whl"))


def install(cell: Cell, wheel: Path) -> None:
    """Make the environment with exactly this Python and torch, and the tested versions of all else.

    Raises CannotHave.
    """
    log = cell.folder / "install.log"
    environment = cell.folder / "venv"
    if call([uv(), "venv", "--quiet", "--python", find_python(cell.python), environment], ROOT, log):
        raise CannotHave(f"Python {cell.python} makes no environment: {last_line(log)}")
    constraints = cell.folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not re.match(rf"({'|'.join(BY_TORCH)})\b", line)]
    constraints.write_text("\n".join(kept) + "\n")
    torch = "torch" if cell.torch == NEWEST else f"torch=={cell.torch}.*"
    command = [uv(), "pip", "install", "--quiet", "--python", environment / "bin/python", "--constraints", constraints]
    if call([*command, torch, f"megalaunch[train,data,dev] @ {wheel.as_uri()}"], ROOT, log):
        raise CannotHave(f"torch {cell.torch} was not installed: {last_line(log)}")
    show = "import torch, platform; print(platform.python_version(), torch.__version__)"
    if call([environment / "bin/python", "-c", show], cell.folder, cell.folder / "versions"):
        raise CannotHave(f"torch {cell.torch} cannot be imported: {last_line(cell.folder / 'versions')}")
    cell.installed = (cell.folder / "versions").read_text().strip()


def find_python(version: str) -> str:
    """Return the newest interpreter of this minor version: on the path, of pyenv or of uv. Raises CannotHave."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    show = ("-c", "import sys; print(sys.executable)")
    searches: list[tuple[str, ...]] = [(f"python{version}", *show)]
    searches += [(str(path), *show) for path in sorted(pyenv.glob(f"{version}.*/bin/python3"))[-1:]]
    searches.append((str(uv()), "python", "find", "--no-python-downloads", version))
    for search in searches:
        try:
            done = subprocess.run(search, capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    raise CannotHave(f"Python {version} is not on this machine")


def train(cell: Cell) -> None:
    """Train outside the checkout: the installed wheel, not the sources."""
    log = cell.folder / "train.log"
    code = call([cell.folder / "venv/bin/megalaunch", "train", *TRAIN], cell.folder, log)
    cell.trained = passed(cell, code, f"train ended with {code}: {log}")


def run_parity(cell: Cell) -> None:
    """Compare layouts with one process, gradient by gradient."""
    log = cell.folder / "parity.log"
    command = [cell.folder / "venv/bin/python", "-m", "pytest", "-q", "-m", "not slow and not gpu and not timed"]
    code = call([*command, "-p", "no:cacheprovider", *PARITY], ROOT, log)
    result = passed(cell, code, f"parity tests: {log}")
    found = re.search(r"(\d+) passed", log.read_text())
    cell.parity = f"{found[1]} tests passed" if found and result == "passed" else result


def resume(reader: Cell, writer: Cell) -> None:
    """Resume the writer's run from its checkpoint of step 3; the losses must be the writer's own."""
    name = f"python{writer.python}-torch{writer.torch}"
    run = reader.folder / "read" / name
    shutil.copytree(writer.run, run)
    shutil.rmtree(run / f"checkpoints/step_{LAST_STEP:08}")
    (run / "outcome.json").unlink()
    log = reader.folder / "read" / f"{name}.log"
    code = call([reader.folder / "venv/bin/megalaunch", "train", *TRAIN, f"run.directory={run}"], reader.folder, log)
    if passed(reader, code, f"resuming the run of {name} ended with {code}: {log}") != "passed":
        return
    own, read = losses(writer.run), losses(run)
    for step in range(RESUMED_STEP + 1, LAST_STEP + 1):
        if not abs(own[step] - read[step]) <= TOLERANCE * own[step]:
            reader.failures.append(f"the run of {name}: loss of step {step} is {read[step]}, its own was {own[step]}")
            return
    if f"resuming after step {RESUMED_STEP}" not in log.read_text():
        reader.failures.append(f"the run of {name} was not resumed: {log}")
        return
    reader.read.append(name)


def losses(run: Path) -> dict[int, float]:
    """Return the losses of a run by step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def table(cells: list[Cell]) -> str:
    """Return the results as a table in Markdown."""
    others = sum(cell.trained == "passed" for cell in cells) - 1
    lines = [
        "| Python | torch | quickstart | parity | resumes the runs of the others |",
        "| --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        if cell.reason:
            lines.append(f"| {cell.python} | {cell.torch} | not run | not run | {cell.reason} |")
            continue
        python, torch = cell.installed.split()
        lines.append(f"| {python} | {torch} | {cell.trained} | {cell.parity} | {len(cell.read)} of {others} |")
    return "\n".join(lines)


def passed(cell: Cell, code: int, failure: str) -> str:
    """Return the word of a result, and keep the failure."""
    if code:
        cell.failures.append(failure)
    return "failed" if code else "passed"


def call(command: list[object], folder: Path, log: Path) -> int:
    """Run a command with its output in a file; returns its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    start = time.monotonic()
    with log.open("a") as output:
        texts = [str(argument) for argument in command]
        code = subprocess.run(texts, cwd=folder, env=environment, stdout=output, stderr=output).returncode
    say(f"  {log.relative_to(FOLDER)}: {code} after {time.monotonic() - start:.0f} s")
    return code


def last_line(log: Path) -> str:
    """Return the last line of a log with something in it."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def uv() -> Path:
    """The installer: it links the packages of all environments to one copy."""
    return Path(sys.executable).with_name("uv")


def say(text: str) -> None:
    """Show progress on standard error: the table is the output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
