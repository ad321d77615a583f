"""Compose command-line overrides to one typed run spec; the only file that imports Hydra.

Config groups, recipes and overrides have Hydra's meaning, but Hydra is imported only for overrides that need its
grammar, to save start-up time. Keys and types are checked against the schema, so that all problems of overrides and
files are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from megalaunch.config.errors import ConfigError
from megalaunch.config.groups import CONF, ConfigValues, display_path, load_option, option_names
from megalaunch.config.interpolation import interpolate
from megalaunch.config.keys import GROUPS, schema_defaults, schema_keys
from megalaunch.config.model_folder import load_model_folder, names_folder, no_weights_note
from megalaunch.config.overrides import COMMAND_LINE, Overrides, parse_overrides, shadowed_overrides
from megalaunch.config.recipes import Recipe, is_path, load_chain, recipe_files
from megalaunch.config.search_space import Categorical, Range
from megalaunch.schema import RunSpec, SpecError, SpecProblem, build_run_spec
from megalaunch.schema.paths import entry_at, put
from megalaunch.schema.yaml_file import YamlProblem, load_yaml

_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,80})")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,80}(?:\.[0-9]{0,80}(?:[eE][+-]?[0-9]{1,5})?|[eE][+-]?[0-9]{1,5})")
_PLAIN_STRING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Origin:
    """The source of a value; `where` is a file:line:column, an option, or "command line".

    `open` is true for a value that is null or auto there: it is derived later.
    """

    kind: Literal["default", "group", "recipe", "command line"]
    where: str
    open: bool = False


@dataclass(frozen=True)
class Composition:
    """A typed spec, the origin of each value, the option of each config group, and the overrides.

    `repeated` are keys that the overrides set more than once; `notes` are about values that a model folder lacks.
    """

    spec: RunSpec
    origins: Mapping[str, Origin]
    choices: Mapping[str, str]
    overrides: tuple[str, ...]
    repeated: tuple[SpecProblem, ...] = ()
    notes: tuple[SpecProblem, ...] = ()


@dataclass
class _Sources:
    """The files and overrides of a composition, before they are merged."""

    overrides: Overrides
    options: dict[tuple[str, str], ConfigValues] = field(default_factory=dict)
    primary: dict[str, str | None] = field(default_factory=dict)
    chain: list[Recipe] = field(default_factory=list)


def compose(overrides: Sequence[str]) -> Composition:
    """Compose a run spec; raises ConfigError with every problem of the overrides and the files they name."""
    return Composer().compose(overrides)


class Composer:
    """Composes many lists of overrides; files are cached, so only the first composition is slow."""

    def __init__(self) -> None:
        self._chains: dict[str, list[Recipe]] = {}
        # By the recipe if given by path, since options may be in its folder; None: all recipes that have a name.
        self._options: dict[str | None, dict[tuple[str, str], ConfigValues]] = {}

    def compose(self, overrides: Sequence[str]) -> Composition:
        """Compose a run spec; see `compose`."""
        problems: list[SpecProblem] = []
        chosen = parse_overrides(overrides, problems)
        recipe = chosen.choices.get("recipe")
        known = self._options.setdefault(recipe if recipe is not None and is_path(recipe) else None, {})
        sources = _Sources(chosen, dict(known))
        _read_files(sources, self._chains, problems)
        incomplete = bool(problems)
        if not incomplete:
            known.update(sources.options)
        choices = _choose_options(sources)
        data = _merge(sources, choices)
        typed = _apply_values(data, sources.overrides, problems)
        origins = _origins(sources, choices, typed)
        if not problems:
            problems += shadowed_overrides(sources.overrides, sources.options, sources.chain, data, typed)
        try:
            spec = build_run_spec(data)
        except SpecError as error:
            problems += _locate(error.problems, origins, sources, incomplete)
        if problems:
            raise ConfigError(problems)
        shown = {group: option for group, option in choices.items() if option}
        marked = _reopen_derived(origins, data)
        return Composition(spec, marked, shown, tuple(overrides), tuple(chosen.duplicates()), _notes(sources, spec))


def _notes(sources: _Sources, spec: RunSpec) -> tuple[SpecProblem, ...]:
    option = sources.overrides.choices.get("model", "")
    if not option or not names_folder(option):
        return ()
    found = [SpecProblem("model", note) for note in sources.options["model", option].notes]
    return (*found, *([] if spec.checkpoint.load_pretrained else [no_weights_note(option)]))


@cache
def _primary_options() -> Mapping[str, str | None]:
    """Return the option of each config group in conf/config.yaml."""
    path = CONF / "config.yaml"
    try:
        entries = load_yaml(path, display_path(path)).data["defaults"]
    except YamlProblem as problem:
        raise ConfigError([SpecProblem("conf", problem.message, problem.where)]) from problem
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def _read_files(sources: _Sources, chains: dict[str, list[Recipe]], problems: list[SpecProblem]) -> None:
    """Read the recipe with its parents, and the chosen option of each config group."""
    sources.primary = dict(_primary_options())
    chosen = sources.overrides.choices
    if "recipe" in chosen:
        override, before = chosen["recipe"], len(problems)
        sources.chain = chains[override] if override in chains else load_chain(override, COMMAND_LINE, problems)
        if len(problems) == before:
            chains[override] = sources.chain
        if not sources.chain or sources.chain[-1].name != override:
            del chosen["recipe"]
    wanted = [(group, option, COMMAND_LINE) for group, option in chosen.items() if group != "recipe"]
    wanted += [(group, option, where) for r in sources.chain for group, (option, where) in r.options.items()]
    wanted += [(group, option, "conf/config.yaml") for group, option in sources.primary.items() if option]
    beside = sources.chain[-1].path.parent if sources.chain and is_path(sources.chain[-1].name) else None
    for group, option, where in wanted:
        if (group, option) not in sources.options:
            # Only an override may be a path; a recipe names options.
            is_folder = group == "model" and where == COMMAND_LINE and names_folder(option, beside)
            values = (
                load_model_folder(option, where, problems)
                if is_folder
                else load_option(group, option, where, problems, beside)
            )
            sources.options[group, option] = ConfigValues() if values is None else values


def _choose_options(sources: _Sources) -> dict[str, str | None]:
    """Return the option of each config group: from the overrides, else the recipe, else conf/config.yaml."""
    picked: dict[str, str | None] = {group: sources.primary.get(group) for group in GROUPS}
    picked |= {group: option for recipe in sources.chain for group, (option, _) in recipe.options.items()}
    return picked | {"recipe": None} | sources.overrides.choices


def _merge(sources: _Sources, choices: Mapping[str, str | None]) -> dict[str, Any]:
    """Merge the schema's defaults, the chosen options and the recipes, parents first; later values win.

    Hydra merges the same files to the same values, but takes half a second more; a test compares both for every shipped
    recipe.
    """
    data = schema_defaults()
    options = [sources.options[group, option].values for group, option in choices.items() if group in GROUPS and option]
    for values in (*options, *(recipe.body.values for recipe in sources.chain)):
        for path, value in values.items():
            put(data, path, value)
    return data


def _apply_values(data: dict[str, Any], overrides: Overrides, problems: list[SpecProblem]) -> dict[str, Any]:
    """Write the values of the overrides into `data`, the last one of a key wins; return them by key."""
    typed: dict[str, Any] = {}
    for path, raw in overrides.values:
        value, problem = _text_value(path, raw) if schema_keys()[path].is_text else _plain_value(path, raw)
        if problem:
            problems.append(SpecProblem(path, problem, COMMAND_LINE))
            continue
        typed[path] = value
        put(data, path, value)
    return typed


def _text_value(path: str, raw: str) -> tuple[str | None, str | None]:
    """Return free text as typed (a path may hold commas and brackets), without one pair of quotes around it."""
    if raw == "null" and schema_keys()[path].takes_null:
        return None, None
    if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
        raw = raw[1:-1]
    return interpolate(raw)


def read_axis(path: str, raw: str) -> Categorical | Range | None:
    """Parse the values of a sweep override: Hydra's choice, range, interval, glob, or values with commas.

    Returns:
        None for an override with a single value.

    Raises:
        ValueError: the sweep cannot be parsed; the message has the reason.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{path}={raw}")
        if not parsed.is_sweep_override():
            return None
        sweep: Any = parsed.value()
        if isinstance(sweep, IntervalSweep):
            low, high = sweep.start or 0.0, sweep.end or 0.0
            return Range(low, high, "log" in sweep.tags, isinstance(low, int) and isinstance(high, int))
        if isinstance(sweep, Glob):
            names = list(recipe_files()) if path == "recipe" else option_names(path) if path in GROUPS else []
            return Categorical(tuple(sorted(sweep.filter(names))))
        if getattr(sweep, "shuffle", False):
            raise ValueError("shuffle has a new order in each run; use --sampler random, whose order is reproducible")
        return Categorical(tuple(dict.fromkeys(parsed.sweep_string_iterator())))
    except HydraException as error:
        if path in schema_keys() and schema_keys()[path].is_text:
            return None  # free text may hold brackets and commas
        raise ValueError(f"cannot read {raw!r}: {str(error).splitlines()[0]}") from error


def plain_scalar(text: str) -> tuple[bool, Any]:
    """Parse a number, true, false, null or one bare string as Hydra's grammar does: (True if it is one, its value)."""
    lower = text.lower()
    if lower in _CONSTANTS:
        return True, _CONSTANTS[lower]
    if _INTEGER.fullmatch(text):
        return True, int(text)
    if _DECIMAL.fullmatch(text):
        return True, float(text)
    return _PLAIN_STRING.fullmatch(text) is not None and lower not in ("nan", "inf"), text


def _plain_value(path: str, raw: str) -> tuple[Any, str | None]:
    """Return (value, None) or (None, problem); Hydra's parser is used only if the text is not a plain scalar."""
    filled, problem = interpolate(raw)
    if problem:
        return None, problem
    is_plain, scalar = plain_scalar(filled)
    if is_plain:
        return scalar, None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{path}={filled}")
    except HydraException:
        return None, f"cannot read the value {raw!r}"
    if parsed.is_sweep_override():
        first = raw.strip("[]()").split(",")[0].rpartition("(")[2].strip()
        return None, f"has several values ({raw}); give one, e.g. {path}={first}, or use `megalaunch sweep`"
    value = parsed.value()
    if isinstance(value, list) and schema_keys()[path].takes_list:
        return value, None
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value), None


def _origins(sources: _Sources, choices: Mapping[str, str | None], typed: Mapping[str, Any]) -> dict[str, Origin]:
    """Return the origin of each leaf of the schema: the last source, in order of composition, that sets it."""
    origins = {path: Origin("default", "default") for path in schema_keys()}
    for group in GROUPS:
        option = choices.get(group)
        if option and (group, option) in sources.options:
            found = sources.options[group, option]
            for path in found.values:
                position = found.positions.get(path)
                origins[path] = Origin("group", f"{group}={option}" + (f", {position}" if position else ""))
    for recipe in sources.chain:
        for path in recipe.body.values:
            origins[path] = Origin("recipe", recipe.body.positions[path])
    return origins | {path: Origin("command line", COMMAND_LINE) for path in typed}


def _reopen_derived(origins: Mapping[str, Origin], data: Mapping[str, Mapping[str, Any]]) -> dict[str, Origin]:
    """Mark the origins of values that are null or auto as open."""
    marked = {}
    for path, origin in origins.items():
        marked[path] = replace(origin, open=entry_at(data, path) in (None, "auto"))
    return marked


def _locate(
    found: list[SpecProblem], origins: Mapping[str, Origin], sources: _Sources, incomplete: bool
) -> list[SpecProblem]:
    """Add the origin to each problem.

    Missing values are omitted if other problems may cause them, or if no recipe is chosen, which is reported instead.
    """
    missing = {p.path for p in found if p.message.startswith("has no value")}
    located = []
    for problem in found:
        if problem.path not in missing:
            origin = origins.get(problem.path)
            located.append(SpecProblem(problem.path, problem.message, origin.where if origin else ""))
    if incomplete or not missing:
        return located
    if not sources.chain:
        message = "no recipe is given; add one, e.g. recipe=quickstart (`megalaunch recipes list` shows all)"
        return [SpecProblem("recipe", message, COMMAND_LINE), *located]
    return [p for p in found if p.path in missing] + located
