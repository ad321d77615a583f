"""Write docs/reference/commands.md: every command with its arguments and options, from the parsers themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalaunch.cli.app import COMMANDS, load_command

_HEAD = """\
# Commands

This page is generated: `scripts/reference` writes it from `megalaunch/cli/`, and a test fails when it is stale.

`megalaunch COMMAND --help` (or `-h`) prints the same. `KEY=VALUE` is an [override](../configuration.md); the
[exit codes](exit-codes.md) are the same for every command.
"""


def commands_page() -> str:
    """Return the page's text."""
    blocks = [_HEAD, *(text for name in COMMANDS for text in _sections(load_command(name), name, "##"))]
    return "\n".join(blocks).rstrip() + "\n"


def _sections(command: Any, path: str, heading: str) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    lines = [f"{heading} `megalaunch {path}`", "", *_escape(command.help or "").splitlines(), ""]
    subcommands = getattr(command, "commands", {})
    rows = [row for parameter in command.params if (row := _row(parameter))]
    if rows and not subcommands:
        lines += ["| argument or option | default | meaning |", "| --- | --- | --- |", *rows, ""]
    if command.epilog:
        lines += [f"Example: `{command.epilog.removeprefix('Example: ')}`", ""]
    yield "\n".join(lines)
    for name, subcommand in subcommands.items():
        yield from _sections(subcommand, f"{path} {name}", "###")


def _row(parameter: Any) -> str | None:
    """Return the table row of a parameter; None for what every command has."""
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    meaning = _escape(getattr(parameter, "help", None) or "").replace("\n", " ")
    if parameter.param_type_name == "argument":
        metavar = parameter.metavar or parameter.name.upper()
        return f"| `{metavar.replace('|', ' or ')}` | {'required' if parameter.required else ''} | {meaning} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.is_flag:
        names += f" `{parameter.metavar.replace('|', ' or ')}`"
    return f"| {names} | {_default(parameter)} | {meaning} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if parameter.is_flag or value is None or callable(value) or value in ("", (), []):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _escape(text: str) -> str:
    """Return help text as Markdown: characters that tables and HTML use are escaped."""
    return text.strip().replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
