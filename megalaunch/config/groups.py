"""Config groups: the option file `conf/<group>/<name>.yaml` has values of one section of the run spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalaunch.config.interpolation import interpolation_problem
from megalaunch.config.keys import GROUPS, is_section, schema_keys
from megalaunch.config.parallel_names import ParallelNameError, is_layout_name, layout_values
from megalaunch.config.platform_options import chips_by_option
from megalaunch.config.unknown_names import unknown_key, unknown_option
from megalaunch.platform.plugins import PlatformError
from megalaunch.schema import RunSpec, SpecError, SpecProblem
from megalaunch.schema.build import check_leaves
from megalaunch.schema.yaml_file import YamlFile, YamlProblem, load_yaml

CONF = Path(__file__).resolve().parent.parent / "conf"
_MAX_SUGGESTIONS = 20  # each one searches all keys
_GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(/[A-Za-z0-9][A-Za-z0-9_-]{0,99}){0,3}")
OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # within the length limit of file names


@dataclass(frozen=True)
class ConfigValues:
    """The leaves that a file sets, by dotted path, the position of each, and notes on ignored entries."""

    values: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def display_path(path: Path) -> str:
    """Return a path as a person would type it: relative if it is below the current folder."""
    for base in (path.resolve(), path):
        try:
            return str(base.relative_to(Path.cwd()))
        except ValueError:
            continue
    return str(path.resolve())


def option_folders(further: Sequence[Path] = ()) -> list[Path]:
    """Return the folders with config groups: this package's, `./conf`, and further ones."""
    folders = [CONF, Path("conf"), *further]
    return list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]


def option_names(group: str, further: Sequence[Path] = ()) -> list[str]:
    """Return the options of a config group, sorted; none for an invalid name. Layouts are too many to list."""
    if not _GROUP_NAME.fullmatch(group):
        return []
    found = {path.stem for folder in option_folders(further) for path in (folder / group).glob("*.yaml")}
    found = set(filter(OPTION_NAME.fullmatch, found))
    if group == "platform":
        with suppress(PlatformError):  # whoever uses such an option is told the reason
            found |= set(chips_by_option())
    return sorted(found)


def option_files(group: str, name: str, further: Sequence[Path] = ()) -> list[Path]:
    """Return the files of one option, none for an invalid name; `load_option` rejects several."""
    if not OPTION_NAME.fullmatch(name):
        return []
    return [path for folder in option_folders(further) if (path := folder / group / f"{name}.yaml").is_file()]


def load_option(
    group: str, name: str, where: str, problems: list[SpecProblem], further: Sequence[Path] = ()
) -> ConfigValues | None:
    """Return the values of one option; None and a problem if it does not exist.

    A user's file may not have the name of a shipped option, nor of a layout: the option would be ambiguous.

    Args:
        where: the origin of the choice, for the problem.
        further: folders with config groups besides megalaunch's and ./conf.
    """
    paths = option_files(group, name, further)
    if len(paths) > 1:
        named = " and ".join(display_path(path) for path in paths)
        problems.append(SpecProblem(group, f"{group}={name} has two files ({named}); rename your own", where))
        return None
    if paths and group == "parallel" and is_layout_name(name):
        message = f"{display_path(paths[0])} is named like a layout, which parallel={name} means; rename it"
        problems.append(SpecProblem(group, message, where))
        return None
    if paths:
        try:
            file = load_yaml(paths[0], display_path(paths[0]))
        except YamlProblem as problem:
            problems.append(SpecProblem(group, problem.message, problem.where))
            return None
        return file_values(file, f"{group}.", problems)
    if group == "parallel":
        try:
            layout = layout_values(name)
        except ParallelNameError as error:
            problems.append(SpecProblem(group, str(error), where))
            return None
        if layout is not None:
            return ConfigValues({f"parallel.{key}": value for key, value in layout.items()})
    if group == "platform":
        try:
            chip = chips_by_option().get(name)
        except PlatformError as error:
            problems.append(SpecProblem(group, str(error), where))
            return None
        if chip is not None:
            return ConfigValues({"platform.chip": chip})
    problems.append(SpecProblem(group, unknown_option(group, name, option_names(group, further)), where))
    return None


def file_values(file: YamlFile, prefix: str, problems: list[SpecProblem]) -> ConfigValues:
    """Return the known leaves of a file; unknown keys and values that are not scalars become problems.

    `prefix` is "" for a recipe (all sections) and `model.` for an option file of that config group.
    """
    values: dict[str, Any] = {}
    positions: dict[str, str] = {}
    unknown: list[str] = []

    def visit(data: Mapping[str, Any], path: str) -> None:
        for name, value in data.items():
            key, local = f"{prefix}{path}{name}", f"{path}{name}"
            position = file.position(local)
            if key in schema_keys():
                _leaf(key, value, position)
            elif is_section(key) and isinstance(value, Mapping):
                visit(value, f"{local}.")
            elif is_section(key):
                problems.append(SpecProblem(key, _not_a_section(key, value), position))
            else:
                unknown.append(key)
                typed = str(value) if isinstance(value, str | int | float) else ""
                message = unknown_key(key, typed) if len(unknown) <= _MAX_SUGGESTIONS else "unknown key"
                problems.append(SpecProblem(key, message, position))

    def _leaf(key: str, value: Any, position: str) -> None:
        if isinstance(value, Mapping) or (isinstance(value, list) and not schema_keys()[key].takes_list):
            problems.append(SpecProblem(key, "must be a single value, not a list or a mapping", position))
            return
        typed, found = check_value(key, value)
        problems.extend(replace(problem, where=position) for problem in found)
        if not found:
            values[key], positions[key] = typed, position

    visit(file.data, "")
    return ConfigValues(values, positions)


def check_value(key: str, value: Any) -> tuple[Any, list[SpecProblem]]:
    """Return a value as the type of its key, and the problems: type, limits, or an interpolation that is refused."""
    texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str) and "${" in item]
    if texts:  # the type is that of the result
        refused = [problem for text in texts if (problem := interpolation_problem(text))]
        return value, [SpecProblem(key, problem) for problem in refused]
    try:
        typed = (check_leaves(RunSpec, {key: value}) or {}).get(key, value)
    except SpecError as error:
        return None, error.problems
    return list(typed) if isinstance(typed, tuple) else typed, []


def _not_a_section(section: str, value: Any) -> str:
    if section in GROUPS and isinstance(value, str):
        return f"is a section; a recipe selects its option in the defaults: `- override /{section}: {value}`"
    return "is a section: write its keys below it, indented"
