"""Write a composition as a recipe that composes to the same spec, with the option files that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megalaunch.config.compose import Composition
from megalaunch.config.groups import load_option, option_names
from megalaunch.config.keys import GROUPS, schema_defaults, schema_keys
from megalaunch.config.parallel_names import layout_name
from megalaunch.config.recipes import HEADER, PICKED_ONLY
from megalaunch.schema import SpecProblem
from megalaunch.schema.paths import entry_at, put, value_at

_PER_RUN = ("run.name", "run.directory")


@dataclass(frozen=True)
class RecipeText:
    """The text of a recipe file, and those of its option files by path relative to the recipe."""

    text: str
    option_files: Mapping[str, str]


def recipe_text(composition: Composition, name: str, summary: str) -> RecipeText:
    """Return a composition as a recipe, without its run.name and run.directory.

    Args:
        name: of option files where no shipped option fits (a recipe may not set keys of parallel, precision and
            platform).
        summary: the comment below the header.
    """
    picks: dict[str, str] = {}
    body: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    inherited: dict[str, Any] = {}
    for group in GROUPS:
        option = _option(composition, group)
        if option is None and group in composition.choices:
            option = name
            files[f"conf/{group}/{name}.yaml"] = _option_text(composition, group)
        elif option is not None:
            inherited |= _option_values(group, option) or {}
        if option is not None:
            picks[group] = option
    defaults = _defaults()
    for path in schema_keys():
        value = _plain(value_at(composition.spec, path))
        omitted = path in _PER_RUN or f"conf/{path.partition('.')[0]}/{name}.yaml" in files
        if not omitted and value != inherited.get(path, defaults[path]):
            put(body, path, value)
    entries: list[Any] = [{f"override /{group}": option} for group, option in picks.items()]
    content = yaml.safe_dump({"defaults": [*entries, "_self_"], **body}, sort_keys=False, allow_unicode=True)
    return RecipeText(f"{HEADER}\n# {' '.join(summary.split())}\n{content}", files)


def _option(composition: Composition, group: str) -> str | None:
    """Return the option to pick: the chosen one, or one that includes the values overridden in its section."""
    chosen = composition.choices.get(group)
    if group not in PICKED_ONLY:
        return chosen if chosen and _option_values(group, chosen) is not None else None
    defaults = _defaults()
    wanted = {path: _plain(value_at(composition.spec, path)) for path in schema_keys() if path.startswith(f"{group}.")}
    names = [chosen] if chosen else []
    if group == "parallel":
        changed = {path.partition(".")[2]: v for path, v in wanted.items() if v != defaults[path]}
        names += [layout] if (layout := layout_name(changed)) else []
    for name in [*names, *option_names(group)]:
        values = _option_values(group, name)
        if values is not None and all(value == values.get(path, defaults[path]) for path, value in wanted.items()):
            return name
    return None


def _option_text(composition: Composition, group: str) -> str:
    """Return an option file with the values of a section that differ from the defaults."""
    defaults, values = _defaults(), dict[str, Any]()
    for path in schema_keys():
        value = _plain(value_at(composition.spec, path))
        if path.startswith(f"{group}.") and value != defaults[path]:
            put(values, path.partition(".")[2], value)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _option_values(group: str, option: str) -> Mapping[str, Any] | None:
    """Return the values of an option; None when it is not found: it is in the folder of the recipe that chose it."""
    problems: list[SpecProblem] = []
    found = load_option(group, option, "", problems)
    return None if found is None else {path: _plain(value) for path, value in found.values.items()}


def _defaults() -> dict[str, Any]:
    """Return the schema's defaults by path."""
    nested = schema_defaults()
    return {path: _plain(entry_at(nested, path)) for path in schema_keys()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
