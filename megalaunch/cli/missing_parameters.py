"""Commands that ask for everything they lack at once, not for one thing at a time."""

from __future__ import annotations

import shlex
from typing import Any

from typer.core import TyperArgument, TyperCommand

from megalaunch.format.table import table_lines


class CompleteCommand(TyperCommand):
    """A command that names every missing argument and option in one message, each with its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse with all that is missing, then parse."""
        missing = [] if ctx.resilient_parsing else self._missing(ctx, args)
        if len(missing) > 1:
            rows = [(_name(parameter), parameter.help or "") for parameter in missing]
            lines = table_lines(rows)
            whole = shlex.join([*ctx.command_path.split(), *args])
            lines.append(f"write:  {whole} {' '.join(name for name, _ in rows)}")
            ctx.fail("\n".join([f"{len(rows)} things are missing:", *lines]))
        return super().parse_args(ctx, args)

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
