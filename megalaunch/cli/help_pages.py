"""The look of help pages: commands in groups with whole sentences, and values by the names that argparse gives them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import partial
from typing import Any

from typer.core import TyperGroup

_NUMBERS = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}


class CommandGroup(TyperGroup):
    """A group whose help page lists its commands, each with its whole first sentence, under one or more headings."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line; for a name that is none and near none, list the commands."""
        near = difflib.get_close_matches(args[0], self.list_commands(ctx))
        if self.get_command(ctx, args[0]) is None and not near and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. The commands are: {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)

    def sections(self, ctx: Any) -> Iterator[tuple[str, list[str]]]:
        """Yield the headings of the list of commands, each with the names below it."""
        yield "Commands", self.list_commands(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands; Typer's own cuts a sentence that is longer than a line."""
        for heading, names in self.sections(ctx):
            commands = {name: self.get_command(ctx, name) for name in names}
            rows = [(name, _first_sentence(command.help)) for name, command in commands.items() if command]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _first_sentence(text: str | None) -> str:
    """Return the first sentence of a help text, as one line."""
    sentence, end, _ = " ".join((text or "").split("\n\n")[0].split()).partition(". ")
    return sentence + end.rstrip()


def name_values(command: Any) -> None:
    """Name the values of a command's parameters, and those of its subcommands: N, NUMBER, one|of|these, FILE_NAME."""
    for subcommand in getattr(command, "commands", {}).values():
        name_values(subcommand)
    for parameter in command.params:
        if parameter.metavar is None and not getattr(parameter, "is_flag", False):
            parameter.metavar = _value_name(parameter)
        if parameter.param_type_name == "argument":
            parameter.get_usage_pieces = partial(_usage_pieces, parameter)


def _value_name(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
    if parameter.name == "overrides":
        return "KEY=VALUE"
    return _NUMBERS.get(parameter.type.name) or str(parameter.name).upper()


def _usage_pieces(parameter: Any, ctx: Any) -> list[str]:
    """Return an argument in the usage line: in brackets if it may be left out, with dots if it may be repeated."""
    name = parameter.metavar.removesuffix("...").removeprefix("[").removesuffix("]")
    dots = "..." if parameter.nargs != 1 else ""
    return [f"{name}{dots}" if parameter.required else f"[{name}]{dots}"]
