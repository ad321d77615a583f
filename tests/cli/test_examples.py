"""Every help page has an example, and the example is a command line that its command takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from megalaunch.cli.app import COMMANDS, app, load_command
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
