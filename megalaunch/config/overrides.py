"""Parse command-line overrides: `group=option`, `section.key=value`, `+`, `++`, `~`, `group@package`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from megalaunch.config.errors import COMMAND_LINE
from megalaunch.config.groups import ConfigValues, check_value, option_names
from megalaunch.config.hydra.grammar import GrammarError, SeveralValues, quoted, read_value
from megalaunch.config.keys import GROUPS, MISSING_VALUE, is_section, schema_keys, suggestion
from megalaunch.config.model_folder import exists
from megalaunch.config.parallel_names import is_layout_name, merge_layout_names
from megalaunch.config.recipes import Recipe, is_path, recipe_files
from megalaunch.config.unknown_names import unknown_key
from megalaunch.format.yaml_value import to_yaml
from megalaunch.schema import SpecProblem
from megalaunch.schema.build import did_you_mean
from megalaunch.schema.paths import entry_at

_SEARCH_PATH = "hydra.searchpath"
_CHOICES = (*GROUPS, "recipe")


@dataclass(frozen=True)
class ValueOverride:
    """`SECTION.KEY=VALUE`: the key, the value as typed and as parsed."""

    key: str
    raw: str
    value: Any


@dataclass(frozen=True)
class Overrides:
    """Parsed overrides.

    Attributes:
        choices: option by config group, `recipe` included.
        values: in the order typed.
        hydra: further ones that Hydra takes as they are: `+experiment=big`, `~schedule`, `hydra.sweep.dir=...`.
        invalid: keys whose override has a problem.
        folders: further folders with config groups: `hydra.searchpath=[FOLDER]`.
    """

    choices: dict[str, str] = field(default_factory=dict)
    values: list[ValueOverride] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    folders: tuple[Path, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The values as overrides for Hydra's own grammar, free text in quotes."""
        return [f"{o.key}={quoted(o.value) if isinstance(o.value, str) else o.raw}" for o in self.values]

    @property
    def packages(self) -> dict[str, str]:
        """Package by path of an option: `+seeds@train=two` gives `seeds/two`."""
        found = {}
        for text in self.hydra:
            target, _, option = text.lstrip("+~").partition("=")
            group, at, package = target.partition("@")
            if at:
                found[f"{group}/{option}"] = package
        return found

    def duplicates(self) -> list[SpecProblem]:
        """Return keys that are set to several values; the last one wins, as in Hydra."""
        given: dict[str, list[str]] = {}
        for override in self.values:
            given.setdefault(override.key, []).append(override.raw)
        return [
            SpecProblem(key, f"is set {len(values)} times ({', '.join(values)}); the last applies: {key}={values[-1]}",
                        COMMAND_LINE)
            for key, values in given.items() if len(dict.fromkeys(values)) > 1
        ]  # fmt: skip


def parse_overrides(overrides: Sequence[str], problems: list[SpecProblem]) -> Overrides:
    """Parse overrides in Hydra's grammar; unknown, incomplete and rejected ones become problems."""
    folders = tuple(_search_path(overrides, problems))
    result = Overrides(folders=folders)
    for override in overrides:
        typed = override.lstrip("+~")
        sign = override[: len(override) - len(typed)]
        key, equals, raw = typed.partition("=")
        problem = _reject(sign, key, equals, raw, folders)
        if problem:
            problems.append(SpecProblem(key or override, problem, COMMAND_LINE))
        elif key in schema_keys():
            _add_value(result, key, _default(key) if sign == "~" else raw, problems)
        elif is_section(key) and key not in GROUPS:
            for path, value in _leaves(key, raw):
                _add_value(result, path, value, problems)
        elif key == _SEARCH_PATH:
            continue
        elif key not in _CHOICES or sign == "~":
            result.hydra.append(override)
        elif key in result.choices:
            message = f"is chosen twice, {key}={result.choices[key]} and {override}; remove one"
            problems.append(SpecProblem(key, message, COMMAND_LINE))
        else:
            result.choices[key] = raw
    return result


def _search_path(overrides: Sequence[str], problems: list[SpecProblem]) -> Iterator[Path]:
    """Yield the folders of `hydra.searchpath=[file://FOLDER, ...]`; those that do not exist become problems."""
    for override in overrides:
        key, _, raw = override.lstrip("+").partition("=")
        if key != _SEARCH_PATH:
            continue
        try:
            value = read_value(key, raw)
        except ValueError:
            value = None
        if not isinstance(value, list):
            problems.append(SpecProblem(key, "must be a list of folders, e.g. [file:///shared/conf]", COMMAND_LINE))
            continue
        for entry in map(str, value):
            folder = Path(entry.removeprefix("file://")).expanduser()
            if folder.is_dir():
                yield folder
            else:
                problems.append(SpecProblem(key, f"{entry} is no folder on this machine", COMMAND_LINE))


def _add_value(result: Overrides, key: str, raw: str, problems: list[SpecProblem]) -> None:
    value, problem = _read_value(key, raw)
    typed, found = (None, [SpecProblem(key, problem)]) if problem else check_value(key, value)
    if found:
        result.invalid.add(key)
        problems.extend(replace(entry, where=COMMAND_LINE) for entry in found)
    else:
        result.values.append(ValueOverride(key, raw, typed))


def _read_value(key: str, raw: str) -> tuple[Any, str]:
    """Return (value, "") or (None, problem). Free text is taken as typed, without one pair of quotes around it."""
    known = schema_keys()[key]
    if known.is_text:
        if raw == "null" and known.takes_null:
            return None, ""
        return (raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" else raw), ""
    try:
        value = read_value(key, raw)
    except SeveralValues:
        first = raw.strip("[]()").split(",")[0].rpartition("(")[2].strip()
        return None, f"has several values ({raw}); give one, e.g. {key}={first}, or use `megalaunch sweep`"
    except GrammarError:
        if "${" in raw:  # Hydra wants quotes around nested interpolations
            return raw, ""
        return None, f"cannot read the value {raw!r}{_quoting_hint(raw)}"
    if isinstance(value, list) and known.takes_list:
        return value, ""
    return (value if isinstance(value, str | int | float | bool | type(None)) else str(value)), ""


def _leaves(section: str, raw: str) -> Iterator[tuple[str, str]]:
    """Yield (key, raw value) of `SECTION={KEY: VALUE, ...}`."""
    for name, value in _mapping(section, raw).items():
        path = f"{section}.{name}"
        if isinstance(value, dict):
            yield from _leaves(path, json.dumps(value))
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)


def _mapping(section: str, raw: str) -> dict[str, Any]:
    try:
        value = read_value(section, raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _default(key: str) -> str:
    """Return the default of a key as the right side of an override."""
    default = schema_keys()[key].field.default
    return MISSING_VALUE if default is MISSING else to_yaml(default)


def _reject(sign: str, key: str, equals: str, raw: str, folders: Sequence[Path]) -> str:
    """Return why an override is rejected, or ""."""
    if sign not in ("", "+", "++", "~"):
        return f"begins with {sign}; Hydra knows + (add), ++ (add or set) and ~ (remove)"
    if not equals and sign != "~":
        return f"is not of the form KEY=VALUE{_form_hint(key)}"
    if key in schema_keys():
        return ""
    if key in _CHOICES:
        return "" if sign == "~" else _bad_choice(key, raw)
    if is_section(key):
        return _bad_section(key, raw)
    if not key:
        return unknown_key(key, raw)
    group = key.partition("@")[0]
    if group.startswith(("hydra.", "hydra/")):
        return ""
    if group in GROUPS or option_names(group, folders):
        return _bad_extra(sign, key, group, raw, folders)
    if "/" in key or "@" in key:
        plain = group.lstrip("/").replace("/", ".")
        return f"{unknown_key(plain)}; write GROUP=OPTION or SECTION.KEY=VALUE"
    return unknown_key(key, raw)


def _bad_section(key: str, raw: str) -> str:
    """Return why `SECTION=...` is rejected, or "": it takes a mapping of known keys."""
    unknown = [path for path, _ in _leaves(key, raw) if path not in schema_keys()]
    if unknown:
        return f"has an unknown key {unknown[0]!r}{suggestion(unknown[0])}"
    if _mapping(key, raw):
        return ""
    first = next(path for path in schema_keys() if path.startswith(f"{key}."))
    example = f"{key}.path={raw}" if key == "tokenizer" and raw else f"{first}=..."
    return f"is a section; set one of its keys, e.g. {example}"


def _bad_extra(sign: str, key: str, group: str, raw: str, folders: Sequence[Path]) -> str:
    """Return why an option of a config group of the user's, or one with a package, is rejected, or ""."""
    if not sign:
        return f"is not in the defaults list of conf/config.yaml; add it: +{key}={raw}"
    known = option_names(group, folders)
    if sign == "~" or raw in known or (group == "parallel" and is_layout_name(raw)):
        return ""
    return f"has no option {raw!r}{did_you_mean(raw, known)} (available: {', '.join(known)})"


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
            recipe = next((r for r in reversed(chain) if path in r.body.values), None)
            if recipe is None:  # an option of the user's own config group, typed like this one
                continue
            message = (
                f"the recipe {recipe.name} sets it to {value}, which masks {wanted} of {group}={option}; "
                f"add {path}={wanted} for the option's value, or {path}={value} for the recipe's"
            )
            problems.append(SpecProblem(path, message, recipe.body.positions[path]))
    return problems


def _quoting_hint(raw: str) -> str:
    """Return how to write a list whose items have characters of Hydra's grammar, such as [--nodes=4]."""
    items = raw[1:-1].split(",") if raw.startswith("[") and raw.endswith("]") else []
    quoted = ",".join(f"'{item.strip()}'" for item in items)
    return f"; quote the items: [{quoted}]" if items and "'" not in raw and '"' not in raw else ""
