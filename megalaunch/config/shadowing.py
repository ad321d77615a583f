"""Detect shadowed overrides: a recipe's own values are merged after the options, so they could mask a typed option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalaunch.config.groups import ConfigValues
from megalaunch.config.overrides import Overrides
from megalaunch.config.recipes import Recipe
from megalaunch.config.schema import SpecProblem
from megalaunch.config.schema.paths import entry_at


def shadowed_overrides(
    overrides: Overrides,
    options: Mapping[tuple[str, str], ConfigValues],
    chain: Sequence[Recipe],
    data: Mapping[str, Mapping[str, Any]],
    typed: Mapping[str, Any],
) -> list[SpecProblem]:
    """Return a problem for each value of a typed option that a recipe replaced, unless the key itself is overridden."""
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
