"""`megalaunch recipes list|show`: what can be run by name."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="List the recipes, or show one.",
)  # fmt: skip


@app.command("list")
def list_recipes() -> None:
    """Every recipe by name, what it is, and the folders that were looked in."""
    from megalaunch.config.options import shown_path
    from megalaunch.config.recipes import read_summary, recipe_files, recipe_folders

    files = recipe_files()
    width = max((len(name) for name in files), default=0)
    for name, path in files.items():
        typer.echo(f"{name:<{width}}  {read_summary(path)}")
    typer.echo(f"from: {', '.join(shown_path(folder) for folder in recipe_folders())}", err=True)


@app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="Name of a recipe, or a path to a .yaml.")],
    whole: Annotated[bool, typer.Option("--whole", help="The composed run, with every default.")] = False,
) -> None:
    """Print a recipe's file, or with --whole the run spec that it composes to."""
    from megalaunch.cli.exit import refuse
    from megalaunch.cli.render import problems_text
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.config.recipes import load_chain
    from megalaunch.config.schema import SpecProblem
    from megalaunch.config.spec_file import spec_to_text

    if whole:
        try:
            typer.echo(spec_to_text(compose([f"recipe={name}"]).spec), nl=False)
        except ConfigError as error:
            refuse(problems_text(error.problems))
        return
    problems: list[SpecProblem] = []
    chain = load_chain(name, "command line", problems)
    if not chain or chain[-1].name != name:
        refuse(problems_text(problems))
    typer.echo(chain[-1].text, nl=False)
