"""Every help page has an example, and the example is a command line that its command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from megalaunch.cli.app import COMMANDS, GROUPS, app, load_command
from megalaunch.cli.examples import EXAMPLES


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    subcommands = getattr(command, "commands", {})
    for name, subcommand in subcommands.items():
        yield from commands(subcommand, f"{path} {name}")
    if not subcommands:
        yield path, command


ALL = {path: command for name in COMMANDS for path, command in commands(load_command(name), name)}


def test_every_command_has_one_example():
    assert ALL.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("path", ALL)
def test_the_example_is_a_command_line_of_its_command(path):
    words = shlex.split(EXAMPLES[path])
    assert words[: len(path.split())] == path.split()
    context = ALL[path].make_context(path, words[len(path.split()) :])  # raises for unknown or missing parameters
    assert context.params is not None


def test_the_example_is_the_last_line_of_the_help_page():
    text = CliRunner().invoke(app, ["convert", "import", "-h"]).output
    assert "Example: megalaunch convert import hf://HuggingFaceTB/SmolLM2-135M" in " ".join(text.split())


@pytest.mark.parametrize(("group", "example"), [([], "train recipe=quickstart"), (["runs"], EXAMPLES["runs list"])])
def test_a_page_that_lists_commands_has_an_example_too(group, example):
    assert CliRunner().invoke(app, [*group, "-h"]).output.endswith(f"\n  Example: megalaunch {example}\n")


def test_the_commands_are_listed_in_groups():
    text = CliRunner().invoke(app, ["-h"]).output
    headings = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Options", *GROUPS]
    assert all(f"\n  {name} " in text for name in COMMANDS)


def test_a_sentence_in_a_list_of_commands_is_whole():
    text = CliRunner().invoke(app, ["data", "-h"]).output
    assert "hashes, every byte." in " ".join(text.split())
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize("path", ALL)
def test_a_help_page_names_values_as_argparse_does(path):
    """An int is N, a float NUMBER, the rest upper case or a choice; a required argument has no brackets."""
    result = CliRunner().invoke(app, [*path.split(), "-h"])
    usage = " ".join(result.output.partition("\n\n")[0].split())
    assert result.exit_code == 0
    assert "<" not in usage + "".join(re.findall(r"^  -.*?  ", result.output, re.MULTILINE))
    assert "{" not in usage
    assert not re.search(r"\] \[?[a-z]", usage), usage
    assert "-h, --help" in result.output


def test_the_values_of_some_parameters():
    text = CliRunner().invoke(app, ["generate", "-h"]).output
    assert text.startswith("Usage: root generate [OPTIONS] RUN_DIR|CHECKPOINT|HF_DIR [LAYOUT]...\n")
    assert "  --seed N  " in text
    assert "  --top-p NUMBER  " in text
    text = CliRunner().invoke(app, ["preprocess", "-h"]).output
    assert text.startswith("Usage: root preprocess [OPTIONS] INPUTS...\n")
    assert "  --on-bad-record stop|skip|quarantine\n" in text
    assert "[KEY=VALUE]..." in CliRunner().invoke(app, ["train", "-h"]).output
