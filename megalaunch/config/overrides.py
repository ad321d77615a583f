"""Parse command-line overrides, `group=option` and `section.key=value`; check them against schema and recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalaunch.config.groups import ConfigValues, option_names
from megalaunch.config.keys import GROUPS, is_section, schema_keys
from megalaunch.config.model_folder import exists
from megalaunch.config.parallel_names import merge_layout_names
from megalaunch.config.recipes import Recipe, is_path, recipe_files
from megalaunch.config.unknown_names import unknown_key
from megalaunch.schema import SpecProblem
from megalaunch.schema.paths import entry_at

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Overrides:
    """Parsed overrides: an option by config group (`recipe` included), and (key, raw value) in the order typed."""

    choices: dict[str, str] = field(default_factory=dict)
    values: list[tuple[str, str]] = field(default_factory=list)

    def duplicates(self) -> list[SpecProblem]:
        """Return keys that are set to several values; the last one wins, as in Hydra."""
        given: dict[str, list[str]] = {}
        for key, value in self.values:
            given.setdefault(key, []).append(value)
        return [
            SpecProblem(key, f"is set {len(values)} times ({', '.join(values)}); the last applies: {key}={values[-1]}",
                        COMMAND_LINE)
            for key, values in given.items() if len(dict.fromkeys(values)) > 1
        ]  # fmt: skip


def parse_overrides(overrides: Sequence[str], problems: list[SpecProblem]) -> Overrides:
    """Parse overrides; unknown, incomplete and rejected ones become problems."""
    result = Overrides()
    for override in overrides:
        key, equals, value = override.partition("=")
        problem = _reject(override, key, equals, value)
        if problem:
            problems.append(SpecProblem(key.lstrip("+~") or override, problem, COMMAND_LINE))
        elif key in schema_keys():
            result.values.append((key, value))
        elif key in result.choices:
            message = f"is chosen twice, {key}={result.choices[key]} and {override}; remove one"
            problems.append(SpecProblem(key, message, COMMAND_LINE))
        else:
            result.choices[key] = value
    return result


def _reject(override: str, key: str, equals: str, value: str) -> str:
    """Return why an override is rejected, or ""."""
    if override.startswith("+"):
        return _plus(override.lstrip("+"))
    if override.startswith("~"):
        return f"~ removes a key, but a run spec has all keys; {_instead_of_removing(key.lstrip('~'))}"
    if not equals:
        return f"is not of the form KEY=VALUE{_form_hint(override)}"
    if key in schema_keys():
        return ""
    if key in (*GROUPS, "recipe"):
        return _bad_choice(key, value)
    if is_section(key):
        first = next(path for path in schema_keys() if path.startswith(f"{key}."))
        example = f"{key}.path={value}" if key == "tokenizer" and value else f"{first}=..."
        return f"is a section; set one of its keys, e.g. {example}"
    if "/" in key or "@" in key:
        plain = key.split("@")[0].lstrip("/").replace("/", ".")
        return f"{unknown_key(plain)}; write GROUP=OPTION or SECTION.KEY=VALUE"
    return unknown_key(key, value)


def _bad_choice(group: str, value: str) -> str:
    if "," in value and not (group == "model" and exists(value)):
        joined = merge_layout_names(value) if group == "parallel" else None
        if joined is not None:
            return f"names several options; write one layout together: parallel={joined}"
        first = value.split(",")[0].strip()
        return f"names several options; give one, e.g. {group}={first}, or use `megalaunch sweep` to run several"
    if not value or value == "null":
        names = "a recipe" if group == "recipe" else ", ".join(option_names(group))
        return f"needs the name of an option ({names})"
    return ""


def _plus(plain: str) -> str:
    key = plain.partition("=")[0]
    if key in schema_keys() or key in (*GROUPS, "recipe"):
        return f"exists already, so omit the +; write {plain}"
    return f"{unknown_key(key, plain.partition('=')[2])} (+ adds a key, but a run spec has only the keys of the schema)"


def _instead_of_removing(key: str) -> str:
    known = schema_keys().get(key.partition("=")[0])
    if known is not None and known.takes_null:
        return f"write {known.path}=null"
    if key.partition("=")[0] in GROUPS:
        return f"choose another option, e.g. {key}={option_names(key)[0]}"
    return "omit the override"


def _form_hint(override: str) -> str:
    """Suggest what an argument without = means: a recipe before a model, since a run starts from a recipe."""
    if override in schema_keys() or override in (*GROUPS, "recipe"):
        return f"; write {override}=VALUE"
    if override in ("help", "-h"):
        return "; write --help"
    recipes = list(recipe_files())
    if override in recipes or is_path(override):
        return f"; did you mean recipe={override}?"
    for group in GROUPS:
        if override in option_names(group):
            return f"; did you mean {group}={override}?"
    if merge_layout_names(override):
        return f"; did you mean parallel={merge_layout_names(override)}?"
    near = difflib.get_close_matches(override, recipes, n=1)
    return f"; did you mean recipe={near[0]}?" if near else ", e.g. recipe=quickstart or train.steps=100"


def shadowed_overrides(
    overrides: Overrides,
    options: Mapping[tuple[str, str], ConfigValues],
    chain: Sequence[Recipe],
    data: Mapping[str, Mapping[str, Any]],
    typed: Mapping[str, Any],
) -> list[SpecProblem]:
    """Return a problem for each value of a typed option that a recipe replaced, unless the key itself is overridden.

    A recipe's own values are merged after the options, so they could mask a typed option.
    """
    problems = []
    for group, option in overrides.choices.items():
        if group == "recipe":
            continue
        for path, wanted in options[group, option].values.items():
            value = entry_at(data, path)
            if path in typed or value == wanted:
                continue
            recipe = next(r for r in reversed(chain) if path in r.body.values)
            message = (
                f"the recipe {recipe.name} sets it to {value}, which masks {wanted} of {group}={option}; "
                f"add {path}={wanted} for the option's value, or {path}={value} for the recipe's"
            )
            problems.append(SpecProblem(path, message, recipe.body.positions[path]))
    return problems
