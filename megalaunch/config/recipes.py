"""Recipes: complete runs by name, from this package, ./recipes, $MEGALAUNCH_RECIPES, or a path."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.config.groups import ConfigValues, display_path, file_values
from megalaunch.config.keys import GROUPS, suggestion
from megalaunch.config.unknown_names import unknown_recipe
from megalaunch.schema import SpecProblem
from megalaunch.schema.yaml_file import YamlFile, YamlProblem, load_yaml

PACKAGED = Path(__file__).resolve().parent.parent / "recipes"
HEADER = "# @package _global_"
PICKED_ONLY = ("parallel", "precision", "platform")
"""Sections that a recipe sets by picking an option, so that the option a user types is never masked."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_MAX_CHAIN = 8
_MAX_PARENTS = 16


@dataclass(frozen=True)
class Recipe:
    """One recipe file: its parent recipes, the options it picks (with their positions), the values it sets."""

    name: str
    path: Path
    text: str
    parents: tuple[str, ...]
    options: Mapping[str, tuple[str, str]]
    body: ConfigValues


def read_summary(path: Path) -> str:
    """Return the comment below the header of a recipe file; "" when there is none or the file cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [file.readline(500).strip() for _ in range(2)]
    except OSError:
        return ""
    return lines[1].lstrip("# ") if lines[1].startswith("#") else ""


def recipe_folders() -> list[Path]:
    """Return the folders in which recipes are looked up; the first match wins."""
    folders = [Path(part).expanduser() for part in os.environ.get("MEGALAUNCH_RECIPES", "").split(os.pathsep) if part]
    folders += [Path("recipes"), PACKAGED]
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.is_dir():
            seen.setdefault(folder.resolve(), folder)
    return list(seen.values())


def recipe_files() -> dict[str, Path]:
    """Return every recipe that has a name, by name, sorted."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if _NAME.fullmatch(name):
                found.setdefault(name, path)
    return dict(sorted(found.items()))


def is_path(override: str) -> bool:
    """Return True for `recipe=./mine.yaml`: a path, not a name."""
    return override.endswith((".yaml", ".yml"))


def find_recipe(name: str) -> Path | None:
    """Return the file of a recipe's name, or None."""
    if not _NAME.fullmatch(name):
        return None
    return next((path for folder in recipe_folders() if (path := folder / f"{name}.yaml").is_file()), None)


def load_chain(override: str, where: str, problems: list[SpecProblem]) -> list[Recipe]:
    """Return a recipe and all recipes that it starts from, ancestors first.

    Raises nothing: a recipe that cannot be read is omitted, with a problem.
    """
    chain: list[Recipe] = []
    _collect(override, where, (), chain, problems)
    return chain


def _collect(
    override: str, where: str, path_here: tuple[str, ...], chain: list[Recipe], problems: list[SpecProblem]
) -> None:
    if override in path_here:
        problems.append(SpecProblem("recipe", _starts_from_itself([*path_here, override], where), where))
        return
    if len(path_here) >= _MAX_CHAIN:
        links = " -> ".join([*path_here, override])
        message = f"inherits through more than {_MAX_CHAIN} recipes: {links}; remove some from the chain"
        problems.append(SpecProblem("recipe", message, where))
        return
    if any(recipe.name == override for recipe in chain):
        return
    recipe = _load(override, where, typed=not path_here, problems=problems)
    if recipe is None:
        return
    for parent in recipe.parents:
        _collect(parent, display_path(recipe.path), (*path_here, override), chain, problems)
    chain.append(recipe)


def _starts_from_itself(links: list[str], where: str) -> str:
    """Describe a cycle, how to break it, and a shipped recipe of the same name that is hidden by the user's."""
    message = f"inherits from itself: {' -> '.join(links)}; remove {links[-1]!r} from the defaults of {where}"
    own = find_recipe(links[-1])
    packaged = PACKAGED / f"{links[-1]}.yaml"
    if own is not None and packaged.is_file() and own.resolve() != packaged.resolve():
        message += f", or rename {display_path(own)}, which hides megalaunch's own recipe {links[-1]}"
    return message


def _load(override: str, where: str, typed: bool, problems: list[SpecProblem]) -> Recipe | None:
    path = Path(override).expanduser() if typed and is_path(override) else find_recipe(override)
    if path is None:
        problems.append(SpecProblem("recipe", _unknown(override, typed), where))
        return None
    try:
        file = load_yaml(path, display_path(path))
    except YamlProblem as problem:
        problems.append(SpecProblem("recipe", problem.message, problem.where))
        return None
    return read_recipe(override, path, file, problems)


def _unknown(override: str, typed: bool) -> str:
    if not typed and (is_path(override) or not _NAME.fullmatch(override)):
        return f"the defaults of a recipe name other recipes, not paths: {override!r}"
    files = (folder / f"{override}.yaml" for folder in recipe_folders())
    if not _NAME.fullmatch(override) and (file := next(filter(Path.is_file, files), None)):
        rule = "a name has letters, digits, '_', '.' and '-'; rename the file, or give its path"
        return f"there is no recipe {override!r}: {rule}: {shlex.quote(f'recipe={file}')}"
    return unknown_recipe(override, list(recipe_files()))


def read_recipe(name: str, path: Path, file: YamlFile, problems: list[SpecProblem]) -> Recipe:
    """Parse and validate a recipe file; rejected entries become problems."""
    if file.text.split("\n", 1)[0].strip() != HEADER:
        problems.append(SpecProblem("recipe", f"the first line of a recipe must be `{HEADER}`", f"{file.path}:1:1"))
    data = dict(file.data)
    defaults = data.pop("defaults", [])
    parents: list[str] = []
    options: dict[str, tuple[str, str]] = {}
    for position, problem, parent, picked in _defaults(defaults, file):
        if problem:
            problems.append(SpecProblem("recipe", problem, position))
        elif parent:
            parents.append(parent)
            if len(parents) > _MAX_PARENTS:
                problems.append(SpecProblem("recipe", f"inherits from more than {_MAX_PARENTS} recipes", position))
                return Recipe(name, path, file.text, (), options, ConfigValues())
        elif picked:
            options[picked[0]] = (picked[1], position)
    body = file_values(YamlFile(file.path, file.text, data, file.positions), "", problems)
    return Recipe(name, path, file.text, tuple(parents), options, _drop_shadowed(body, problems))


_Entry = tuple[str, str, str, tuple[str, str] | None]  # position, problem, parent, (group, option)


def _defaults(defaults: Any, file: YamlFile) -> Iterator[_Entry]:
    if not isinstance(defaults, list):
        yield file.position("defaults"), "defaults must be a list, e.g. `- override /model: llama3_8b`", "", None
        return
    for index, entry in enumerate(defaults):
        position = file.position(f"defaults.{index}")
        if entry == "_self_":
            problem = "" if index == len(defaults) - 1 else "_self_ must be the last entry: a recipe's own values win"
            yield position, problem, "", None
        elif isinstance(entry, str):
            yield position, "", entry, None
        elif isinstance(entry, dict) and len(entry) == 1:
            yield _picked_options(position, *next(iter(entry.items())))
        else:
            yield (
                position,
                "an entry must be `- override /GROUP: OPTION` or the name of a recipe to inherit from",
                "",
                None,
            )


def _picked_options(position: str, key: str, option: Any) -> _Entry:
    override, _, target = key.partition(" ")
    group = target.strip().removeprefix("/") if override == "override" else key.removeprefix("/")
    if group == "recipe":  # as on the command line: recipe=NAME
        return (
            (position, "", option, None) if isinstance(option, str) else (position, "recipe must be a name", "", None)
        )
    if group not in GROUPS:
        return (
            position,
            f"there is no config group {group!r}{suggestion(group)} (available: {', '.join(GROUPS)})",
            "",
            None,
        )
    if override != "override" or not target.strip().startswith("/"):
        return position, f"write `- override /{group}: {option}`", "", None
    if not isinstance(option, str):
        return position, f"override /{group} must be the name of an option", "", None
    return position, "", "", (group, option)


def _drop_shadowed(body: ConfigValues, problems: list[SpecProblem]) -> ConfigValues:
    """Drop values of PICKED_ONLY sections, each with a problem: they would mask an option that the user types."""
    values = {}
    for key, value in body.values.items():
        group = key.partition(".")[0]
        if group not in PICKED_ONLY:
            values[key] = value
            continue
        option = "tp2" if group == "parallel" else "OPTION"
        message = (
            f"a recipe must not set keys of {group}: they would mask {group}=... on the command line; "
            f"select an option in its defaults: `- override /{group}: {option}`"
        )
        problems.append(SpecProblem(key, message, body.positions[key]))
    return ConfigValues(values, body.positions)
