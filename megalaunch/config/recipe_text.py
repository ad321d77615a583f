"""A composition written as a recipe that composes to the same spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megalaunch.config.compose import Composition
from megalaunch.config.keys import GROUPS, schema_defaults, schema_keys
from megalaunch.config.layouts import layout_name
from megalaunch.config.options import load_option, option_names
from megalaunch.config.recipes import HEADER, PICKED_ONLY
from megalaunch.config.schema import SpecProblem
from megalaunch.config.schema.paths import entry_at, put, value_at

_OF_ONE_RUN = ("run.name", "run.directory")


@dataclass(frozen=True)
class RecipeText:
    """A recipe file's text, and the words that must be typed beside it: what only an option file could hold."""

    text: str
    words: tuple[str, ...]


def recipe_text(composition: Composition, summary: str) -> RecipeText:
    """Write a composition down, without its run.name and run.directory; `summary` is the line below the header."""
    picks: dict[str, str] = {}
    body: dict[str, dict[str, Any]] = {}
    words: list[str] = []
    below: dict[str, Any] = {}
    for group in GROUPS:
        option = _option(composition, group)
        if option is not None:
            picks[group] = option
            below |= _option_values(group, option)
    defaults = schema_defaults()
    for path in schema_keys():
        value = value_at(composition.spec, path)
        if path in _OF_ONE_RUN or _same(value, below.get(path, entry_at(defaults, path))):
            continue
        if path.partition(".")[0] in PICKED_ONLY:
            words.append(f"{path}={word_of(value)}")
        else:
            put(body, path, list(value) if isinstance(value, tuple) else value)
    entries: list[Any] = [{f"override /{group}": option} for group, option in picks.items()]
    content = yaml.safe_dump({"defaults": [*entries, "_self_"], **body}, sort_keys=False, allow_unicode=True)
    return RecipeText(f"{HEADER}\n# {' '.join(summary.split())}\n{content}", tuple(words))


def _option(composition: Composition, group: str) -> str | None:
    """The option to pick: the chosen one, or where values were typed over it the one that holds all of them."""
    chosen = composition.choices.get(group)
    if group not in PICKED_ONLY:
        return chosen
    defaults = schema_defaults()
    wanted = {path: value_at(composition.spec, path) for path in schema_keys() if path.startswith(f"{group}.")}
    names = [chosen] if chosen else []
    if group == "parallel":
        changed = {p.partition(".")[2]: v for p, v in wanted.items() if not _same(v, entry_at(defaults, p))}
        names += [name] if (name := layout_name(changed)) else []
    for name in [*names, *option_names(group)]:
        values = _option_values(group, name)
        if all(_same(value, values.get(path, entry_at(defaults, path))) for path, value in wanted.items()):
            return name
    return chosen


def _option_values(group: str, option: str) -> Mapping[str, Any]:
    problems: list[SpecProblem] = []
    found = load_option(group, option, "", problems)
    return {} if found is None else found.values


def _same(value: Any, other: Any) -> bool:
    return bool(
        (list(value) if isinstance(value, tuple) else value) == (list(other) if isinstance(other, tuple) else other)
    )


def word_of(value: Any) -> str:
    """A value as it is typed: `null`, `true`, `[norm,mlp]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
