"""docs/data.md is walked: its Python runs, its commands succeed, and they print what the page shows.

Numbers differ with the version of Python whose sources are the corpus, so they are compared as their kind. So does the
format in which a run computes that names none: bf16 where the processor has a unit for it.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
MEGALAUNCH = str(Path(sys.executable).with_name("megalaunch"))


def kind(line: str) -> str:
    """A line with its numbers, bars and blanks made alike."""
    line = re.sub(r"\(gigatoken\)|\(tokenizers\)", "(engine)", line).replace("precision  bf16", "precision  fp32")
    return re.sub(r"[\d#][\d,.#]*|\s+", lambda match: " " if match[0].isspace() else "N", line).strip()


def steps() -> list[tuple[list[str], list[str]]]:
    """In the order of the page, the arguments of each command or script and the lines printed below it."""
    found: list[tuple[list[str], list[str]]] = []
    for language, block in re.findall(r"^```(python|console)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append(([sys.executable, "-c", block], []))
            continue
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(([MEGALAUNCH, *shlex.split(line)[2:]], []))
            else:
                found[-1][1].append(line)
    return found


@pytest.mark.slow
def test_the_walk(tmp_path):
    assert len(steps()) >= 10
    for command, shown in steps():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = {kind(line) for line in (done.stdout + done.stderr).splitlines()}
        for line in shown:
            if line == "..." or " tokens  " in line or line.startswith(("step", "  run")):
                continue  # what a progress line or the bins of a histogram say depends on the moment and the corpus
            assert kind(line) in printed or kind(line) == kind("---"), line
        if "open_training" in command[-1]:
            for mark in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"):
                assert mark in done.stdout
