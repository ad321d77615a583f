"""Compose command-line overrides to one typed run spec.

Hydra composes: it picks the option of each config group and merges schema, options, recipe and overrides; OmegaConf
interpolates. Before, every file and override is checked against the schema, so that all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hydra.errors import HydraException

from megalaunch.config.errors import COMMAND_LINE, ConfigError
from megalaunch.config.files import BY_PATH, ConfigFiles, OptionCache
from megalaunch.config.groups import ConfigValues, option_names
from megalaunch.config.hydra.api import Composed, compose_config
from megalaunch.config.hydra.grammar import GrammarError, read_sweep, read_text
from megalaunch.config.hydra.nodes import ConfigNodes
from megalaunch.config.hydra.resolve import to_plain_data
from megalaunch.config.keys import GROUPS, schema_keys
from megalaunch.config.model_folder import names_folder, no_weights_note
from megalaunch.config.overrides import Overrides, parse_overrides, shadowed_overrides
from megalaunch.config.recipes import Recipe, is_path, recipe_files
from megalaunch.config.search_space import Categorical, Range
from megalaunch.schema import RunSpec, SpecError, SpecProblem, build_run_spec
from megalaunch.schema.build import build_section
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.paths import entry_at

_COMMAND_LINE_ONLY = ("train.eval_tasks.include_path",)


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


def compose(overrides: Sequence[str]) -> Composition:
    """Compose a run spec; raises ConfigError with every problem of the overrides and the files they name."""
    return Composer().compose(overrides)


def compose_launcher(overrides: Sequence[str]) -> LauncherSpec:
    """Compose the `launcher` section alone, for work that has no recipe; raises ConfigError with every problem."""
    return Composer().launcher(overrides)


def with_hydra(overrides: Sequence[str], use: Callable[[ConfigNodes, list[str]], None]) -> None:
    """Call `use` with the configs of a composition and its overrides in Hydra's grammar.

    Raises ConfigError with every problem of the overrides and the files they name.
    """
    problems: list[SpecProblem] = []
    parsed = parse_overrides(overrides, problems)
    files = ConfigFiles(parsed.choices, parsed.packages, parsed.folders, problems)
    files.read({}, {})
    if problems:
        raise ConfigError(problems)
    use(files, [*_choice_overrides(files), *parsed.hydra, *parsed.texts])


class Composer:
    """Composes many lists of overrides; files are read, and merged by Hydra, once for all that choose the same."""

    def __init__(self) -> None:
        self._chains: dict[str, list[Recipe]] = {}
        self._options: OptionCache = {}
        self._chosen: dict[tuple[str, ...], tuple[ConfigFiles, Composed]] = {}

    def compose(self, overrides: Sequence[str]) -> Composition:
        """Compose a run spec; see `compose`."""
        problems: list[SpecProblem] = []
        parsed = parse_overrides(overrides, problems)
        files, composed = self._compose_files(parsed, problems)
        incomplete = bool(problems)
        choices = {group: files.typed_option(group, option) for group, option in composed.choices.items()}
        typed = {override.key: override.value for override in parsed.values}
        with composed.with_values(typed) as config:
            data, unresolved = to_plain_data(config)
        origins = _origins(files, choices, typed)
        problems += [SpecProblem(path, text, _where(origins, path)) for path, text in unresolved.items()]
        problems += _not_typed(origins, data)
        if not problems:
            problems += shadowed_overrides(parsed, files.options, files.chain, data, typed)
        try:
            spec = build_run_spec(data)
        except SpecError as error:
            found = [p for p in error.problems if p.path not in unresolved and p.path not in parsed.invalid]
            problems += _locate(found, origins, bool(files.chain), incomplete)
        if problems:
            raise ConfigError(problems)
        marked = _reopen_derived(origins, data)
        repeated = tuple(parsed.duplicates())
        return Composition(spec, marked, choices, tuple(overrides), repeated, _notes(files, spec))

    def launcher(self, overrides: Sequence[str]) -> LauncherSpec:
        """Compose the `launcher` section; see `compose_launcher`."""
        problems: list[SpecProblem] = []
        parsed = parse_overrides(overrides, problems)
        _, composed = self._compose_files(parsed, problems)
        typed = {override.key: override.value for override in parsed.values}
        with composed.with_values(typed) as config:
            data, unresolved = to_plain_data(config)
        problems += [SpecProblem(path, text) for path, text in unresolved.items()]
        try:
            section = build_section(LauncherSpec, data["launcher"], "launcher.")
        except SpecError as error:
            problems += [problem for problem in error.problems if problem.path not in parsed.invalid]
        if problems:
            raise ConfigError(problems)
        return section

    def _compose_files(self, parsed: Overrides, problems: list[SpecProblem]) -> tuple[ConfigFiles, Composed]:
        """Read the chosen files and let Hydra merge them; raises ConfigError if it merges nothing."""
        chosen = (
            *(f"{group}={option}" for group, option in parsed.choices.items()),
            *parsed.hydra,
            *map(str, parsed.folders),
        )
        if chosen in self._chosen:
            return self._chosen[chosen]
        files = ConfigFiles(parsed.choices, parsed.packages, parsed.folders, problems)
        files.read(self._chains, self._options)
        try:
            composed = compose_config(files, _choice_overrides(files), parsed.hydra)
        except RecursionError as error:
            message = "the defaults lists of your config files include each other in a circle; remove one entry"
            raise ConfigError([*problems, SpecProblem("defaults", message, COMMAND_LINE)]) from error
        except HydraException as error:
            message = " ".join(str(error.__cause__ or error).split())
            raise ConfigError([*problems, SpecProblem("hydra", message, COMMAND_LINE)]) from error
        if not problems:
            self._options[files.further] = files.options
            self._chosen[chosen] = files, composed
        return files, composed


def _choice_overrides(files: ConfigFiles) -> list[str]:
    """Return the typed options as overrides for Hydra; an option that cannot be read is omitted."""
    chosen = []
    for group, option in files.choices.items():
        if group == "recipe":
            if files.chain and files.chain[-1].name == option:
                chosen.append(f"recipe={BY_PATH if is_path(option) else option}")
        elif (group, option) not in files.unreadable:
            by_path = group == "model" and names_folder(option, files.further)
            chosen.append(f"{group}={BY_PATH if by_path else option}")
    return chosen


def _notes(files: ConfigFiles, spec: RunSpec) -> tuple[SpecProblem, ...]:
    option = files.choices.get("model", "")
    if not option or not names_folder(option):
        return ()
    found = [SpecProblem("model", note) for note in files.options["model", option].notes]
    return (*found, *([] if spec.checkpoint.load_pretrained else [no_weights_note(option)]))


def read_axis(path: str, raw: str) -> Categorical | Range | None:
    """Parse the values of a sweep override: Hydra's choice, range, interval, glob, or values with commas.

    Returns:
        None for an override with a single value.

    Raises:
        GrammarError: the sweep cannot be parsed; the message has the reason.
    """
    try:
        axis = read_sweep(
            path,
            raw,
            lambda: list(recipe_files()) if path == "recipe" else option_names(path) if path in GROUPS else [],
        )
    except GrammarError:
        if path in schema_keys() and schema_keys()[path].is_text:
            return None  # free text may hold brackets and commas
        raise
    as_typed = path not in schema_keys() or schema_keys()[path].is_text
    return Categorical(tuple(map(read_text, axis.values))) if as_typed and isinstance(axis, Categorical) else axis


def _origins(files: ConfigFiles, choices: Mapping[str, str], typed: Mapping[str, Any]) -> dict[str, Origin]:
    """Return the origin of each leaf of the schema: the last source, in order of composition, that sets it."""
    origins = {path: Origin("default", "default") for path in schema_keys()}
    for group in GROUPS:
        found = files.options.get((group, choices.get(group, "")), ConfigValues())
        origins |= _group_origins(f"{group}={choices.get(group)}", found)
    for recipe in files.chain:
        for path in recipe.body.values:
            origins[path] = Origin("recipe", recipe.body.positions[path])
    for path, found in files.extra.items():
        group, _, option = path.rpartition("/")
        origins |= _group_origins(f"{group}={option}", found)
    return origins | {path: Origin("command line", COMMAND_LINE) for path in typed}


def _group_origins(option: str, found: ConfigValues) -> dict[str, Origin]:
    positions = {path: found.positions.get(path) for path in found.values}
    return {path: Origin("group", option + (f", {at}" if at else "")) for path, at in positions.items()}


def _where(origins: Mapping[str, Origin], path: str) -> str:
    return origins[path].where if path in origins else ""


def _not_typed(origins: Mapping[str, Origin], data: Mapping[str, Mapping[str, Any]]) -> list[SpecProblem]:
    """Return a problem for each key that only the command line may set, but a file sets."""
    return [
        SpecProblem(path, "leads to code that is run, so only the command line may set it", origins[path].where)
        for path in _COMMAND_LINE_ONLY
        if origins[path].kind in ("recipe", "group") and entry_at(data, path) is not None
    ]


def _reopen_derived(origins: Mapping[str, Origin], data: Mapping[str, Mapping[str, Any]]) -> dict[str, Origin]:
    """Mark the origins of values that are null or auto as open."""
    marked = {}
    for path, origin in origins.items():
        marked[path] = replace(origin, open=True) if entry_at(data, path) in (None, "auto") else origin
    return marked


def _locate(
    found: list[SpecProblem], origins: Mapping[str, Origin], has_recipe: bool, incomplete: bool
) -> list[SpecProblem]:
    """Add the origin to each problem.

    Missing values are omitted if other problems may cause them, or if no recipe is chosen, which is reported instead.
    """
    missing = {p.path for p in found if p.message.startswith("has no value")}
    located = []
    for problem in found:
        if problem.path not in missing:
            located.append(SpecProblem(problem.path, problem.message, _where(origins, problem.path)))
    if incomplete or not missing:
        return located
    if not has_recipe:
        message = "no recipe is given; add one: recipe=quickstart works here (`megalaunch recipes list` shows all)"
        branch = origins.get("checkpoint.branch_from")
        if branch is not None and branch.kind == "command line":
            message = (
                "no recipe is given: a branch takes a run's state, not its settings; type those of its overrides.txt"
            )
        return [SpecProblem("recipe", message, COMMAND_LINE), *located]
    return [p for p in found if p.path in missing] + located
