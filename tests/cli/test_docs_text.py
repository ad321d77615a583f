"""Commands that pages show as text exist, take the options, and have overrides that compose.

They need a network, a GPU, another machine or an hour; those of `sh` blocks and transcripts are run, by test_docs.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from paths import ROOT
from typer import Exit

from megalaunch.cli.app import load_command
from megalaunch.config.compose import compose

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHOWN = ("text", "")
COMMAND = re.compile(r"^ *(?:\$ )?(?:megalaunch|scripts/run) +([a-z][a-z-]*(?: .*)?)$", re.MULTILINE)
ENDS = {"|", ">", ">>", "<", "2>&1", "&", "&&", ";"}
READERS = re.compile(r"hf://|=\./|=FOLDER$|^\.\.\.$")  # what only the reader has, or leaves to the reader
COMPOSED = ("train", "plan", "validate-config")


def command_lines(page: str) -> Iterator[list[str]]:
    """Yield the words of each subcommand of ours on a page, up to a pipe or a redirection."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    for block in (text for language, text in blocks if language in SHOWN):
        for line in COMMAND.findall(block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            yield words[: next((at for at, word in enumerate(words) if word in ENDS), len(words))]


def parse(words: list[str]) -> list[str]:
    """Parse a command line as its command does, and return its overrides; raises what the command raises."""
    command, rest = load_command(words[0]), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    try:
        context = command.make_context(words[0], rest)
    except Exit as end:
        if end.exit_code:
            pytest.fail(f"{shlex.join(words)} ends with {end.exit_code}")
        return []  # --help
    return list(context.params.get("overrides") or ())


LINES = sorted({tuple(words) for page in PAGES for words in command_lines(page)})
OVERRIDES = sorted(
    {
        tuple(word for word in words if "=" in word and word[0] != "-" and not READERS.search(word))
        for words in LINES
        if words[0] in COMPOSED
    }
)


def test_the_pages_have_commands():
    assert (len(LINES) > 25, len(OVERRIDES) > 10) == (True, True)


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_takes_its_options(words):
    parse(list(words))


def test_a_command_that_is_none_is_found():
    with pytest.raises(pytest.fail.Exception, match="plan recipe=tiny --dep ends with 2"):
        parse(["plan", "recipe=tiny", "--dep"])


def test_the_overrides_of_the_pages_compose(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for overrides in OVERRIDES:
        compose(overrides)
