"""Each change of scripts/mutations.yaml, made in a copy of the source, has to make one of its tests fail.

Exit code 0: all were noticed; 1: some were not, or a test fails on the unchanged source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutations.yaml"
TESTS_FAILED = 1  # pytest's exit code; any other but 0 means that no test ran to its end
NEVER_ENDED = 256  # no exit code; a rank that waits for ever is noticed, too
SECONDS = 600  # for the tests of one change


@dataclass(frozen=True)
class Mutation:
    """`line` of `file`, found there once, `becomes` another; one of `tests` (pytest's arguments) has to fail."""

    name: str
    file: str
    line: str
    becomes: str
    tests: str

    def apply(self, root: Path) -> None:
        """Change the file below `root`; raises ValueError when the line is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.file} holds the line {text.count(self.line)} times: {self.line!r}")
        path.write_text(text.replace(self.line, self.becomes), encoding="utf-8")


def mutations() -> list[Mutation]:
    """The list, in its order."""
    return [Mutation(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))]


def main(names: list[str]) -> int:
    """Run all, or those named; prints one line each."""
    every = mutations()
    unknown = set(names) - {mutation.name for mutation in every}
    if unknown:
        print(f"no such change: {', '.join(sorted(unknown))}; there are: {', '.join(m.name for m in every)}")
        return 2
    chosen = [mutation for mutation in every if not names or mutation.name in names]
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "source"
        copy_source(copy)
        failing = [tests for tests in dict.fromkeys(m.tests for m in chosen) if run_tests(copy, tests) != 0]
        for tests in failing:
            print(f"fails without any change: pytest {tests}")
        unnoticed = [] if failing else [mutation for mutation in chosen if not noticed(mutation, copy)]
    return 1 if failing or unnoticed else 0


def copy_source(target: Path) -> None:
    """All files that git knows or would take."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        source = ROOT / name
        if not name or not (source.is_symlink() or source.is_file()):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)


def noticed(mutation: Mutation, copy: Path) -> bool:
    """Does a test fail with the change? Prints the answer."""
    path = copy / mutation.file
    original = path.read_text(encoding="utf-8")
    mutation.apply(copy)
    began = time.monotonic()
    try:
        code = run_tests(copy, mutation.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    answers = {0: "NOT NOTICED", TESTS_FAILED: "noticed", NEVER_ENDED: "noticed, for the tests never end"}
    answer = answers.get(code, f"NO ANSWER (pytest's exit code is {code})")
    print(f"{answer:<12} {time.monotonic() - began:5.0f} s  {mutation.name}", flush=True)
    return code in (TESTS_FAILED, NEVER_ENDED)


def run_tests(copy: Path, tests: str) -> int:
    """pytest's exit code on the copy, stopping at the first failure; or NEVER_ENDED."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    # A change within a second that keeps the file's size would otherwise be read from the bytecode of before.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return NEVER_ENDED
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
