"""Explain a key: its meaning and type (`explain KEY`), its value and origin (`validate-config --explain KEY`)."""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING

from megalaunch.config.errors import ConfigError
from megalaunch.config.groups import option_names
from megalaunch.config.keys import GROUPS, Key, schema_keys, suggestion
from megalaunch.format.yaml_value import to_yaml
from megalaunch.schema import RunSpec, SpecProblem
from megalaunch.schema.build import describe
from megalaunch.schema.paths import value_at

if TYPE_CHECKING:
    from megalaunch.config.compose import Composition


def explain_key(path: str, composition: Composition, resolved: RunSpec) -> str:
    """Return lines about a key, or every key of a section, in a composition; raises ConfigError for an unknown key."""
    keys = [key for name, key in schema_keys().items() if name == path or name.startswith(f"{path}.")]
    if not keys:
        raise ConfigError([SpecProblem(path, f"unknown key{suggestion(path)}", "command line")])
    return "\n".join(_lines(key, composition, resolved) for key in keys)


def describe_keys(path: str) -> list[str]:
    """Return meaning, type and default of a key or of each key of a section, without a run; [] for an unknown one."""
    keys = [key for name, key in schema_keys().items() if name == path or name.startswith(f"{path}.")]
    return [f"{key.path}{_unit(key)}\n  {key.field.metadata['meaning']}\n  {_takes(key)}" for key in keys]


def describe_options(group: str) -> list[str]:
    """Return the options of a config group; [] for another name, and for layouts, whose names follow a grammar."""
    if group not in GROUPS or group == "parallel":
        return []
    return [f"{group}=NAME, with NAME one of", f"  {', '.join(option_names(group))}"]


def _unit(key: Key) -> str:
    return f" [{key.field.metadata['unit']}]" if key.field.metadata["unit"] else ""


def _takes(key: Key) -> str:
    default = "none" if key.field.default is MISSING else to_yaml(key.field.default)
    return f"takes: {describe(key.annotation)}; default: {default}"


def _lines(key: Key, composition: Composition, resolved: RunSpec) -> str:
    origin = composition.origins[key.path]
    given, final = value_at(composition.spec, key.path), value_at(resolved, key.path)
    derived = f", given as {to_yaml(given)} and derived" if given != final else ""
    return "\n".join(
        [
            f"{key.path} = {to_yaml(final)}{_unit(key)}",
            f"  {key.field.metadata['meaning']}",
            f"  from: {origin.where}{derived}",
            f"  {_takes(key)}",
        ]
    )
