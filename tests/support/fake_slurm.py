"""Slurm's commands as a script of our own: `sbatch` and the others note their calls, and answer as told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python}
import json, os, sys
folder = {folder!r}
name = os.path.basename(sys.argv[0])
with open(os.path.join(folder, "calls.jsonl"), "a") as calls:
    print(json.dumps([name, *sys.argv[1:]]), file=calls)
with open(os.path.join(folder, "answers.json")) as file:
    answers = json.load(file)
fits = [key for key in answers if " ".join([name, *sys.argv[1:]]).startswith(key)]
key = max(fits, key=len, default=None)
if key is None:
    sys.exit(name + ": error: no answer")
code, out, err = answers[key]
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class FakeSlurm:
    """Commands in `folder/bin`; `answer` says what a command that starts with some words prints."""

    def __init__(self, folder: Path, python: str) -> None:
        self._folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("sbatch", "scontrol", "scancel", "sacct", "squeue"):
            program = self.bin / name
            program.write_text(_PROGRAM.format(python=python, folder=str(folder)))
            program.chmod(0o755)
        self._answers: dict[str, list[Any]] = {}
        self.answer("sbatch --test-only", err="sbatch: Job 12 to start at 2026-11-24T00:00:00 on nodes n[1-2]\n")
        self.answer("sbatch --parsable", "12\n")
        self.answer("scancel", "")

    def answer(self, command: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Set what a command prints; the file is replaced at once, so that a running follower sees all of it."""
        self._answers[command] = [code, out, err]
        new = self._folder / "answers.new"
        new.write_text(json.dumps(self._answers))
        new.replace(self._folder / "answers.json")

    def job(self, state: str, **fields: object) -> None:
        """Set the state of job 12 for `scontrol show job`."""
        shown = {"Reason": "None", "Restarts": 0, "ReqNodeList": "(null)", "NodeList": "(null)", **fields}
        words = " ".join(f"{name}={value}" for name, value in shown.items())
        self.answer("scontrol --oneliner show job 12", f"JobId=12 JobName=fake JobState={state} {words}\n")

    @property
    def calls(self) -> list[list[str]]:
        """The commands so far."""
        path = self._folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
