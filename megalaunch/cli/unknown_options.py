"""Answers options that a command with KEY=VALUE arguments does not have: all at once, each with what to type instead.

Megatron-LM's flags are the common case, and how `import-megatron` reads them is known.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from megalaunch.format.table import table_lines

_RECIPE_OPTIONS = ("--config", "--config-file", "--config-name", "--config-path", "--recipe")


@dataclass(frozen=True)
class Unknown:
    """An option that does not exist, and the words that follow it up to the next option or KEY=VALUE argument."""

    option: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The option as it was typed."""
        return shlex.join([self.option, *self.values])


class OverridesCommand(TyperCommand):
    """A command whose settings are KEY=VALUE arguments, so that most unknown options are settings spelt otherwise."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse every unknown option with its counterpart, then parse."""
        own = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = list(find_unknown(args, {name for name in own if name.startswith("-")}))
        if unknown and not ctx.resilient_parsing:
            from megalaunch.runs.errors import refuse

            refuse(refusal(ctx.command_path, unknown, sorted(own)))
        return super().parse_args(ctx, args)


def find_unknown(arguments: Sequence[str], own: set[str]) -> Iterator[Unknown]:
    """The options among the arguments that are not in `own`, with their values; nothing behind `--` is one."""
    before_end = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for index, argument in enumerate(before_end):
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in own:
            continue
        values = [value] if equals else []
        for following in [] if equals else before_end[index + 1 :]:
            if following.startswith("--") or "=" in following:
                break
            values.append(following)
        yield Unknown(option, tuple(values))


def refusal(command: str, unknown: Sequence[Unknown], own: Sequence[str]) -> str:
    """One line an option, and the next step."""
    many = "s" if len(unknown) > 1 else ""
    lines = [f"error: `{command}` has no option{many} {', '.join(entry.option for entry in unknown)}"]
    lines += table_lines((entry.text, _instead(entry, own)) for entry in unknown)
    lines.append("settings are written KEY=VALUE; a whole Megatron-LM script: `megalaunch import-megatron SCRIPT`")
    return "\n".join(lines)


def _instead(entry: Unknown, own: Sequence[str]) -> str:
    from megalaunch.config.keys import schema_keys
    from megalaunch.importers.megatron.spelling import translate

    plain = entry.option.lstrip("-")
    value = " ".join(entry.values)
    if entry.option in _RECIPE_OPTIONS:
        return "write " + shlex.quote(f"recipe={value or 'NAME'}")
    if plain in schema_keys():
        return "write " + shlex.quote(f"{plain}={value or 'VALUE'}")
    near = difflib.get_close_matches(entry.option.replace("_", "-"), own, n=1, cutoff=0.8)
    if near:
        return f"did you mean {near[0]}?"
    answer = translate(plain, entry.values)
    if answer is None:
        return "is no option of Megatron-LM either"
    return f"write {shlex.join(answer.overrides)}" if answer.overrides else f"leave it out: {answer.reason}"
