"""Usage errors: unknown commands, unknown options and missing parameters, each answered with what to type.

All unknown options, or all missing parameters, are reported in one message.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperArgument, TyperCommand

from megalaunch.format.table import table_lines

_RECIPE_OPTIONS = ("--config", "--config-file", "--config-name", "--config-path", "--recipe")
_OTHER_NAMES = {
    "--version": ("version",),
    "evaluate": ("eval",),
    "generate": ("chat", "infer", "inference", "sample"),
    "import-megatron": ("import",),
    "preprocess": ("prepare", "tokenize"),
    "serve": ("api-server", "deploy", "server"),
    "train": ("fit", "finetune", "launch", "pretrain", "resume", "run", "start"),
    "validate-config": ("check", "lint", "validate"),
    "watch": ("attach",),
}
"""Other programs' names of each command."""


def next_step(arguments: Sequence[str], commands: Sequence[str]) -> str:
    """Return a suggestion for a command that does not exist: the nearest command line, or how to list the commands.

    >>> next_step(["trian", "recipe=tiny"], ["train", "plan"])
    "Did you mean 'megalaunch train recipe=tiny'?"
    """
    recipe = _recipe_argument(arguments[0])
    wanted = ["train", recipe] if recipe else [_command_for(arguments[0], commands)]
    if wanted[0] is not None:
        return f"Did you mean '{shlex.join(['megalaunch', *wanted, *arguments[1:]])}'?"
    return "'megalaunch --help' lists the commands."


def _command_for(name: str, commands: Sequence[str]) -> str | None:
    for command, others in _OTHER_NAMES.items():
        if name.lower() in others:
            return command
    near = difflib.get_close_matches(name.lower().replace("_", "-"), commands, n=1)
    return near[0] if near else None


def _recipe_argument(argument: str) -> str | None:
    """Return the override that `train` takes for an argument in its place: `recipe=tiny`, tiny or tiny.yaml."""
    from megalaunch.config.recipes import is_path, recipe_files

    if "=" in argument:
        return argument
    return f"recipe={argument}" if is_path(argument) or argument in recipe_files() else None


@dataclass(frozen=True)
class UnknownOption:
    """An option that does not exist, with the arguments after it up to the next option or KEY=VALUE argument."""

    option: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The option as it was typed."""
        return shlex.join([self.option, *self.values])


class OverridesCommand(TyperCommand):
    """A command that takes overrides: an unknown option is most often a setting in another program's spelling."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Report all unknown options, each with its counterpart; else parse."""
        own = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = list(find_unknown_options(args, {name for name in own if name.startswith("-")}))
        if unknown and not ctx.resilient_parsing:
            from megalaunch.runs.errors import refuse

            refuse(unknown_options_message(ctx.command_path, unknown, sorted(own)))
        return super().parse_args(ctx, args)


def find_unknown_options(arguments: Sequence[str], own: set[str]) -> Iterator[UnknownOption]:
    """Yield the options that are not in `own`, with their values; arguments after `--` are not options."""
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
        yield UnknownOption(option, tuple(values))


def unknown_options_message(command: str, unknown: Sequence[UnknownOption], own: Sequence[str]) -> str:
    """Return one line per option, and how to write settings."""
    plural = "s" if len(unknown) > 1 else ""
    lines = [f"error: `{command}` has no option{plural} {', '.join(entry.option for entry in unknown)}"]
    lines += table_lines((entry.text, _replacement(entry, own)) for entry in unknown)
    lines.append("write settings as KEY=VALUE; convert a Megatron-LM script with `megalaunch import-megatron SCRIPT`")
    return "\n".join(lines)


def _replacement(entry: UnknownOption, own: Sequence[str]) -> str:
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
        return "unknown to Megatron-LM too"
    return f"write {shlex.join(answer.overrides)}" if answer.overrides else f"leave it out: {answer.reason}"


class ParametersCommand(TyperCommand):
    """A command that reports all missing arguments and options in one message, each with its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Report all missing parameters; else parse."""
        missing = [] if ctx.resilient_parsing else self._missing(ctx, args)
        if len(missing) > 1:
            rows = [(_name(parameter), parameter.help or "") for parameter in missing]
            lines = table_lines(rows)
            typed = shlex.join([*ctx.command_path.split(), *args])
            lines += self.examples(args)
            lines.append(f"write:  {typed} {' '.join(name for name, _ in rows)}")
            ctx.fail("\n".join([f"{len(rows)} parameters are missing:", *lines]))
        return super().parse_args(ctx, args)

    def examples(self, args: Sequence[str]) -> list[str]:
        """Return lines with commands that work here as they stand; none by default."""
        return []

    def _missing(self, ctx: Any, args: list[str]) -> list[Any]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        if any(given.get(str(parameter.name)) for parameter in self.get_params(ctx) if parameter.is_eager):
            return []  # --help
        required = [parameter for parameter in self.get_params(ctx) if parameter.required]
        return [parameter for parameter in required if not given.get(str(parameter.name))]


def _name(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return parameter.metavar or str(parameter.name).upper()
    return f"{parameter.opts[0]} {parameter.metavar or parameter.name.upper()}"
