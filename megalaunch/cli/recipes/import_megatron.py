"""`megalaunch import-megatron`: a Megatron-LM launch script becomes a recipe; the script is read, never run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalaunch.runs.import_megatron.importer import Imported


def import_megatron(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A launch script or argument list; - reads standard input.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="RECIPE.yaml", help="Write the recipe here, and its option files next to it.")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A variable the script expects; 1=VALUE is its first argument."
        ),
    ] = None,
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="The target platform, e.g. h100.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a Megatron-LM launch script to a recipe, and report the result for every flag.

    Nothing is executed: variables, defaults, arrays and arithmetic are read as data.
    """
    from megalaunch.config.groups import option_names
    from megalaunch.config.unknown_names import unknown_option
    from megalaunch.importers.megatron.bash_lexer import ScriptProblem
    from megalaunch.runs.errors import fail
    from megalaunch.runs.import_megatron.importer import import_script, report_text

    if platform is not None and platform not in (known := option_names("platform")):
        fail(unknown_option("platform", platform, known))
    text = _read(file)
    shown = "standard input" if file == "-" else file
    try:
        imported = import_script(text, _name(file, output), Path(shown).name, _variables(variables or []), platform)
    except ScriptProblem as problem:
        place = f"{shown}:{problem.line}" if problem.line else shown
        fail(f"{place}: {problem.message}")
    if output is not None:
        _write(imported, output, force)
    if as_json:
        typer.echo(_json(imported))
    elif output is None:
        typer.echo(_files_text(imported), nl=False)
        typer.echo(report_text(imported), err=True)
    else:
        typer.echo(report_text(imported))
        typer.echo(f"\nwrote {', '.join(map(str, _paths(imported, output)))}")
        typer.echo(f"next: megalaunch validate-config {shlex.quote(f'recipe={output}')}")


def _read(file: str) -> str:
    import sys

    from megalaunch.importers.megatron.bash_lexer import MAX_BYTES
    from megalaunch.runs.errors import fail

    try:
        stream = sys.stdin.buffer if file == "-" else Path(file).expanduser().open("rb")
        with stream:
            return stream.read(MAX_BYTES + 1).decode("utf-8", errors="replace")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")


def _name(file: str, output: Path | None) -> str:
    stem = output.stem if output is not None else Path(file).stem if file != "-" else "imported"
    return re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_") or "imported"


def _variables(overrides: list[str]) -> dict[str, str]:
    from megalaunch.runs.errors import fail

    for variable in overrides:
        if "=" not in variable or not re.fullmatch(r"\w+", variable.partition("=")[0]):
            fail(f"--set {variable}: write NAME=VALUE")
    return {name: value for name, _, value in (variable.partition("=") for variable in overrides)}


def _paths(imported: Imported, output: Path) -> list[Path]:
    return [output, *(output.parent / name for name in imported.recipe.option_files)]


def _write(imported: Imported, output: Path, force: bool) -> None:
    from megalaunch.runs.errors import fail

    if output.suffix not in (".yaml", ".yml"):
        fail(f"{output}: a recipe's file ends in .yaml")
    taken = [path for path in _paths(imported, output) if path.exists()]
    if taken and not force:
        fail(f"{', '.join(map(str, taken))} exists; name another file, or add --force")
    texts = [imported.recipe.text, *imported.recipe.option_files.values()]
    try:
        for path, text in zip(_paths(imported, output), texts, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{error.filename} cannot be written: {error.strerror}")


def _files_text(imported: Imported) -> str:
    parts = [imported.recipe.text]
    parts += [f"\n# --- {path} (next to the recipe)\n{text}" for path, text in imported.recipe.option_files.items()]
    return "".join(parts)


def _json(imported: Imported) -> str:
    import json

    return json.dumps(
        {
            "recipe": imported.recipe.text,
            "option_files": dict(imported.recipe.option_files),
            "options": dict(imported.recipe.picked),
            "values": dict(imported.values),
            "flags": [
                {"flag": entry.flag, "values": list(entry.values), "status": entry.status, "text": entry.text}
                for entry in imported.flags
            ],
            "defaults": dict(imported.defaults),
            "missing": list(imported.missing),
            "problems": list(imported.problems),
            "notes": list(imported.notes),
        },
        indent=2,
    )
