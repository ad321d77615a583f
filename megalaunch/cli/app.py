"""The `megalaunch` command: a table of subcommands, each imported only when it is asked for.

So `megalaunch --help` imports none of them, and a fault in one breaks no other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalaunch.cli.help_pages import CommandGroup, name_values
from megalaunch.version import __version__

if TYPE_CHECKING:
    from typer.core import TyperCommand


@dataclass(frozen=True)
class Subcommand:
    """Where a command is: `attribute` of `module` is a function with Typer annotations, or a Typer app.

    `makes_files`: the command continues when its standard output is closed.
    """

    module: str
    attribute: str
    help: str
    makes_files: bool = False


GROUPS: Mapping[str, Mapping[str, Subcommand]] = {
    "Train": {
        "train": Subcommand("train.train", "train", "Train a model, or resume a run.", True),
        "sweep": Subcommand("sweep", "sweep", "Run a sweep; invalid points are skipped.", True),
        "watch": Subcommand("train.watch", "watch", "Show the display of a run launched elsewhere."),
        "report": Subcommand("runs.report", "report", "Write an HTML page about runs."),
        "runs": Subcommand("runs.runs", "app", "List, compare and clean runs."),
    },
    "Check and plan": {
        "validate-config": Subcommand(
            "train.validate_config", "validate_config", "Check a run and report all problems at once."
        ),
        "plan": Subcommand("plan.plan", "plan", "Predict memory and speed; search for the best layout."),
        "explain": Subcommand("reference.explain", "explain", "Explain a rule, a key, an exit code or an event."),
        "recipes": Subcommand("recipes.recipes", "app", "List the recipes, show one, or compare two."),
        "import-megatron": Subcommand(
            "recipes.import_megatron", "import_megatron", "Convert a Megatron-LM script to a recipe."
        ),
    },
    "Jobs": {
        "status": Subcommand("jobs.jobs", "status", "Show the job of a run: its state and its progress."),
        "logs": Subcommand("jobs.jobs", "logs", "Print the output of a run's job, or the log of a rank."),
        "stop": Subcommand("jobs.jobs", "stop", "Stop a run: it saves a checkpoint and ends."),
        "list": Subcommand("jobs.jobs", "list_jobs", "List the runs that were submitted as jobs."),
    },
    "Data": {
        "preprocess": Subcommand("data.preprocess", "preprocess", "Tokenize text or jsonl into .bin/.idx files.", True),
        "data": Subcommand("data.data", "app", "Inspect, verify, merge and split token files.", True),
        "tokenizer": Subcommand("data.tokenizer", "app", "Train or inspect a tokenizer.", True),
    },
    "Models": {
        "generate": Subcommand("text.generate", "generate", "Generate text with a trained model."),
        "serve": Subcommand("text.serve", "serve", "Serve a model over HTTP, with OpenAI's interface."),
        "evaluate": Subcommand("text.evaluate", "evaluate", "Evaluate a model: loss, perplexity, lm-eval tasks."),
        "checkpoint": Subcommand("checkpoint.checkpoint", "app", "List, inspect and verify checkpoints."),
        "convert": Subcommand("checkpoint.convert", "app", "Convert checkpoints: Hugging Face, Megatron-LM.", True),
    },
    "Machine": {
        "doctor": Subcommand("doctor", "doctor", "Report the devices and packages of this machine."),
        "platform": Subcommand("platform", "app", "Check the operators of a platform."),
    },
}
"""The commands under the headings of `megalaunch --help`, in its order."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class LazyGroup(CommandGroup):
    """Lists commands from the table; imports one only to run it or to show its own help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def sections(self, ctx: Any) -> Iterator[tuple[str, list[str]]]:
        """The headings of the table, each with the names below it."""
        for heading, commands in GROUPS.items():
            yield heading, list(commands)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Return a stub with the name and help of a command, for the list of commands."""
        found = COMMANDS.get(cmd_name)
        if found is None:
            return None
        from typer.core import TyperCommand

        return TyperCommand(cmd_name, help=found.help, callback=None)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `help COMMAND` as `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command, once its name is known to be right."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            from megalaunch.cli.usage_errors import next_step

            ctx.fail(f"No such command {args[0]!r}. {next_step(args, list(COMMANDS))}")
        name, listed, rest = super().resolve_command(ctx, args)
        if name and COMMANDS[name].makes_files:
            from megalaunch.cli.output.closed_output import ignore_broken_pipe

            ignore_broken_pipe()
        return name, load_command(name) if name and listed else listed, rest

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command line; end it with cause and fix if a package of a platform is broken."""
        try:
            return super().main(*args, **settings)
        except Exception as error:
            _end_with_platform_error(error)
            raise


def _end_with_platform_error(error: Exception) -> None:
    """End the command if a package of a platform is broken: any command may look at it, or import torch, which does."""
    import traceback

    from megalaunch.platform.plugins import PlatformError
    from megalaunch.platform.torch_backends import broken_backend

    found = error if isinstance(error, PlatformError) else broken_backend("".join(traceback.format_exception(error)))
    if found is not None:
        print(f"error: {found.cause}\nfix:  {found.fix}", file=sys.stderr)
        sys.exit(2)


def load_command(name: str) -> Any:
    """Import a subcommand and build its parser."""
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(f"megalaunch.cli.{entry.module}"), entry.attribute)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(name, cls=_command_class(target), help=target.__doc__ or entry.help)(target)
        target = single
    command = typer.main.get_command(target)
    command.name = name
    name_values(command)
    from megalaunch.cli.examples import add_examples

    add_examples(command, name)
    return command


def _command_class(function: Any) -> type[TyperCommand] | None:
    """Return the class of a command that takes overrides; None: Typer's own."""
    if "overrides" not in function.__annotations__:
        return None
    from megalaunch.cli.usage_errors import OverridesCommand

    return OverridesCommand


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train large language models with Megatron-style parallelism from declarative recipes.",
    epilog="Example: megalaunch train recipe=quickstart",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megalaunch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the subcommand."""
