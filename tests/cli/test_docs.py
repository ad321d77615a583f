"""The documents hold: links lead somewhere, commands are valid, printed output is what the command prints."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from paths import ROOT
from slow_cases import slow_but
from warm_process import MEGALAUNCH

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/dev").glob("*.md"))
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """The files that a page shows: blocks of YAML or JSON that name one, which its commands read."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^```(?:yaml|json) (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def write_files(page: Path, folder: Path) -> None:
    for name, content in files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def commands(page: Path) -> list[list[str]]:
    """The arguments after `scripts/run` or `megalaunch` in every sh block of a page."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            arguments = shlex.split(line, comments=True)
            if arguments and arguments[0] in ("scripts/run", "megalaunch"):
                found.append(arguments[1:])
    return found


ALL_COMMANDS = {tuple(arguments): page for page in reversed(PAGES) for arguments in commands(page)}
# docs/deep-plan.md, whose figures need torch, has a test of its own (test_deep_plan.py).
TRANSCRIPTS = sorted(
    {
        (page, block)
        for page in PAGES
        for block in blocks(page, "console")
        if block.startswith(("$ megalaunch validate", "$ megalaunch plan")) and " --deep " not in block
    }
)


def run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*MEGALAUNCH, *arguments]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    for name in re.findall(r"`((?:megalaunch|tests|conf|recipes|kernels|scripts|docs)/[\w./]+)`", page.read_text()):
        if "NAME" not in name:
            assert (ROOT / name).exists(), f"{page.name}: {name}"


# doctor loads every package there is: tests/cli/test_doctor.py calls it, too.
CHECKED = [pytest.param(words, marks=[pytest.mark.slow] * (words[0] == "doctor")) for words in sorted(ALL_COMMANDS)]


@pytest.mark.parametrize("arguments", CHECKED, ids=" ".join)
def test_commands_are_valid(arguments, tmp_path):
    """train is checked up to the launch; commands that need a trained run are held to their options only."""
    write_files(ALL_COMMANDS[arguments], tmp_path)
    arguments = [argument for argument in arguments if argument != "--prepare-only"]
    for argument in arguments:  # texts that a page calls the reader's own
        key, _, name = argument.partition("=")
        if key == "data.corpus" and re.fullmatch(r"\w+", name):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.txt").write_text("some text\n")
    if arguments[0] == "train":
        done = run([*arguments, "--dry-run"], tmp_path)
    elif arguments[0] in ("watch", "generate", "serve", "evaluate", "preprocess"):
        shown = run([arguments[0], "--help"], tmp_path).stdout
        assert all(argument in shown for argument in arguments if argument.startswith("--"))
        return
    else:
        done = run(arguments, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "transcript"),
    slow_but(TRANSCRIPTS, *TRANSCRIPTS[::3]),
    ids=[text.splitlines()[0] for _, text in TRANSCRIPTS],
)
def test_printed_output_is_real(page, transcript, tmp_path):
    write_files(page, tmp_path)
    command, _, printed = transcript.partition("\n")
    done = run(shlex.split(command)[2:], tmp_path)
    said = (done.stdout + done.stderr).replace(f"{ROOT}/", "")  # pages name no checkout's place
    for part in re.split(r"^\.\.\.\n", printed, flags=re.M):  # lines are left out there
        found = said.find(part.strip())
        assert found >= 0, f"{part}is not in the rest of the output:\n{said}"
        said = said[found:]


RULES = re.findall(
    r"^```text\n\$ megalaunch (.*?)\n(.*?)^```$", (ROOT / "docs/reference/rules.md").read_text(), re.M | re.S
)


# All are made by the checker itself (test_reference.py); a few tell whether the command prints what they show.
@pytest.mark.parametrize(
    ("command", "printed"), slow_but(RULES[3::60], RULES[3]), ids=[command for command, _ in RULES[3::60]]
)
def test_an_example_of_a_rule_is_what_the_command_prints(command, printed, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.txt").write_text("some text\n")
    done = run(shlex.split(command), tmp_path)
    for part in re.split(r"^ *\.\.\.\n", printed, flags=re.M):  # lines are left out there
        assert part.strip() in done.stdout + done.stderr


def test_there_is_something_to_test():
    assert len(RULES) > 250
    assert len(ALL_COMMANDS) >= 8
    assert len(TRANSCRIPTS) >= 5
