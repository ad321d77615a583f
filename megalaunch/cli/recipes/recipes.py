"""`megalaunch recipes list|show|diff`: list the recipes, show one, or compare two."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.help_pages import CommandGroup

if TYPE_CHECKING:
    from megalaunch.schema import RunSpec

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="List the recipes, show one, or compare two.",
)  # fmt: skip

Recipe = Annotated[str, typer.Argument(help="Name of a recipe, or a path to a .yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_recipes(
    as_json: AsJson = False,
    names: Annotated[bool, typer.Option("--names", help="Print only the names, one per line.")] = False,
) -> None:
    """List every recipe: size, devices, layout and sequence length, and the folders searched."""
    from megalaunch.config.recipes import recipe_files, recipe_folders

    if names:
        found = list(recipe_files())
        typer.echo(json.dumps(found) if as_json else "\n".join(found))
        return
    from dataclasses import asdict

    from megalaunch.cli.recipes.index import list_rows
    from megalaunch.cli.recipes.table import rows_text
    from megalaunch.config.groups import display_path

    rows = list_rows()
    typer.echo(json.dumps([asdict(row) for row in rows], indent=2) if as_json else rows_text(rows))
    typer.echo(f"from: {', '.join(display_path(folder) for folder in recipe_folders())}", err=True)


@app.command("show")
def show_recipe(
    name: Recipe,
    composed: Annotated[bool, typer.Option("--composed", help="Show the composed run, with every default.")] = False,
) -> None:
    """Print a recipe's file, or with --composed the composed run spec."""
    from megalaunch.config.errors import ConfigError
    from megalaunch.config.recipes import load_chain
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import refuse
    from megalaunch.schema import SpecProblem
    from megalaunch.schema.spec_file import spec_to_text

    if composed:
        from megalaunch.config.compose import compose

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


@app.command("diff")
def diff_recipes(left: Recipe, right: Recipe, as_json: AsJson = False) -> None:
    """Compare the runs of two recipes, with every default and derived value."""
    from megalaunch.cli.recipes.table import differences_text, spec_differences

    found = spec_differences(_resolved(left), _resolved(right))
    if as_json:
        differences = [{"key": key, "left": one, "right": other} for key, one, other in found]
        typer.echo(json.dumps({"left": left, "right": right, "differences": differences}, indent=2))
    else:
        typer.echo(differences_text((left, right), found))


def _resolved(recipe: str) -> RunSpec:
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import problems_text
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine
    from megalaunch.runs.errors import refuse

    try:
        composition = compose([f"recipe={recipe}"])
    except ConfigError as error:
        refuse(problems_text(error.problems))
    return resolve(composition.spec, detect_machine(), recipe).spec
