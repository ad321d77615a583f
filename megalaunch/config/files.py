"""The files of one composition, read and checked: what Hydra's search path serves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megalaunch.config.errors import COMMAND_LINE, ConfigError
from megalaunch.config.groups import (
    CONF,
    ConfigValues,
    display_path,
    file_values,
    load_option,
    option_files,
    option_folders,
    option_names,
)
from megalaunch.config.hydra.nodes import ConfigNode
from megalaunch.config.keys import GROUPS
from megalaunch.config.model_folder import load_model_folder, names_folder
from megalaunch.config.recipes import Recipe, is_path, load_chain, recipe_files, recipe_folders
from megalaunch.schema import SpecProblem
from megalaunch.schema.paths import put
from megalaunch.schema.yaml_file import YamlFile, YamlProblem, load_yaml

BY_PATH = "_by_path_"
"""Hydra's name of an option that is given by path, as `recipe=./mine.yaml` and `model=./folder`."""

OptionCache = dict[tuple[Path, ...], dict[tuple[str, str], ConfigValues]]
"""Values of options by (group, option), by the further folders in which they were looked up."""

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)\s*")


@dataclass
class ConfigFiles:
    """Configs by path, for Hydra; each is read once, and every rejected entry is in `problems`.

    Attributes:
        choices: the typed option of each config group, `recipe` included; a path is served as `BY_PATH`.
        packages: package of an option of a further config group, by path: `+seeds@train=two` gives `seeds/two`.
        folders: further folders with config groups (`hydra.searchpath`).
        options: values of options of the run spec's sections, by (group, option).
        extra: values of options of the user's own config groups (`+experiment=big`), by path.
        chain: the recipe, after the recipes that it inherits from.
        unreadable: options with a problem, by (group, option); Hydra composes without them.
    """

    choices: Mapping[str, str]
    packages: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    problems: list[SpecProblem] = field(default_factory=list)
    options: dict[tuple[str, str], ConfigValues] = field(default_factory=dict)
    extra: dict[str, ConfigValues] = field(default_factory=dict)
    chain: list[Recipe] = field(default_factory=list)
    unreadable: set[tuple[str, str]] = field(default_factory=set)
    _nodes: dict[str, ConfigNode | None] = field(default_factory=dict)

    def read(self, chains: dict[str, list[Recipe]], known: OptionCache) -> None:
        """Read the recipe with its parents, and the options that it and the overrides choose.

        `chains` and `known` cache the recipes and the options of compositions without a problem.
        """
        recipe = self.choices.get("recipe")
        if recipe is not None:
            before = len(self.problems)
            self.chain = chains[recipe] if recipe in chains else load_chain(recipe, COMMAND_LINE, self.problems)
            if len(self.problems) == before:
                chains[recipe] = self.chain
        self.options = dict(known.get(self.further, {}))
        for group, option in self.choices.items():
            if group != "recipe":
                self._option(group, option, COMMAND_LINE)
        for entry in self.chain:
            for group, (option, where) in entry.options.items():
                self._option(group, option, where)

    @property
    def further(self) -> tuple[Path, ...]:
        """Folders with config groups besides megalaunch's and ./conf: also `conf` beside a recipe given by path."""
        beside = [self.chain[-1].path.parent / "conf"] if self.chain and is_path(self.chain[-1].name) else []
        return (*beside, *self.folders)

    def typed_option(self, group: str, option: str) -> str:
        """Return an option as it was typed: a path for `BY_PATH`."""
        return self.choices[group] if option == BY_PATH else option

    def names(self, group: str) -> Sequence[str]:
        """Return the options of a config group that have a file."""
        if group == "":
            return sorted({path.name for folder in self._group_folders() for path in folder.iterdir() if path.is_dir()})
        if group == "recipe" or group.startswith("recipe/"):
            prefix = f"{group}/".removeprefix("recipe/")
            return [name.removeprefix(prefix) for name in recipe_files() if name.startswith(prefix)]
        return option_names(group, self.further)

    def node(self, path: str) -> ConfigNode | None:
        """Return a config for Hydra; None if it is none of ours."""
        if path not in self._nodes:
            self._nodes[path] = self._read_node(path)
        return self._nodes[path]

    def _read_node(self, path: str) -> ConfigNode | None:
        group, _, name = path.rpartition("/")
        if name == "None":  # the defaults list says null
            return None
        if path == "config":
            return ConfigNode(primary_config())
        if group.split("/")[0] == "recipe":
            return self._recipe_node(path.removeprefix("recipe/"))
        if group in GROUPS:
            values = self._option(group, self.typed_option(group, name), "").values
            return ConfigNode(nested({key.removeprefix(f"{group}."): value for key, value in values.items()}))
        return self._extra_node(group, name) if group and not group.startswith("hydra") else None

    def _option(self, group: str, option: str, where: str) -> ConfigValues:
        """Return the values of an option, none if it has problems."""
        if (group, option) not in self.options:
            # Only an override may be a path; a recipe names options.
            is_folder = group == "model" and where == COMMAND_LINE and names_folder(option, self.further)
            values = (
                load_model_folder(option, where, self.problems)
                if is_folder
                else load_option(group, option, where, self.problems, self.further)
            )
            if values is None:
                self.unreadable.add((group, option))
            self.options[group, option] = ConfigValues() if values is None else values
        return self.options[group, option]

    def _recipe_node(self, name: str) -> ConfigNode | None:
        """Return a recipe of the chain; recipes that an option file names are read now."""
        typed = self.choices.get("recipe")
        chain = self.chain
        if name == BY_PATH and typed is not None:
            name = typed
        elif all(recipe.name != name for recipe in chain):
            chain = load_chain(name, "", self.problems)
        found = next((recipe for recipe in chain if recipe.name == name), None)
        return ConfigNode(self._recipe_content(found, chain), "_global_") if found else None

    def _recipe_content(self, recipe: Recipe, chain: Sequence[Recipe]) -> dict[str, Any]:
        """Return a recipe for Hydra: every ancestor once, in the order of the chain; the last recipe picks all options.

        Hydra refuses a config that is included twice, as a common ancestor of two parents would be.
        """
        earlier = chain[: chain.index(recipe)]
        pending = {entry.name for entry in earlier} - {parent for entry in earlier for parent in entry.parents}
        defaults: list[Any] = [f"/recipe/{parent}" for parent in recipe.parents if parent in pending]
        if recipe is chain[-1]:
            options = {group: option for entry in chain for group, (option, _) in entry.options.items()}
            picked = [entry for entry in options.items() if entry not in self.unreadable]
            defaults += [{f"override /{group}": option} for group, option in picked]
        return {"defaults": [*defaults, "_self_"], **nested(recipe.body.values)}

    def _extra_node(self, group: str, name: str) -> ConfigNode | None:
        """Return an option of a config group of the user's, e.g. conf/experiment/big.yaml for +experiment=big."""
        paths = option_files(group, name, self.further)
        if not paths:
            return None
        try:
            file = load_yaml(paths[0], display_path(paths[0]))
        except YamlProblem as problem:
            self.problems.append(SpecProblem(group, problem.message, problem.where))
            return ConfigNode({})
        package = self.packages.get(f"{group}/{name}", _package(file.text))
        data = dict(file.data)
        defaults = data.pop("defaults", None)
        prefix = "" if package == "_global_" else f"{package or group.replace('/', '.')}."
        values = file_values(YamlFile(file.path, file.text, data, file.positions), prefix, self.problems)
        self.extra[f"{group}/{name}"] = values
        content = nested({key.removeprefix(prefix): value for key, value in values.values.items()})
        return ConfigNode({**({"defaults": defaults} if defaults is not None else {}), **content}, package)

    def search_path(self) -> list[Path]:
        """Return the folders with config groups and those with recipes."""
        return [*self._group_folders(), *recipe_folders()]

    def _group_folders(self) -> list[Path]:
        return [folder for folder in option_folders(self.further) if folder.is_dir()]


@cache
def primary_config() -> Mapping[str, Any]:
    """Return conf/config.yaml: the schema, then one option of each config group, then the recipe."""
    path = CONF / "config.yaml"
    try:
        return load_yaml(path, display_path(path)).data
    except YamlProblem as problem:
        raise ConfigError([SpecProblem("conf", problem.message, problem.where)]) from problem


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        put(data, path, value)
    return data


def _package(text: str) -> str | None:
    """Return the package of a file's header, `# @package _global_`; None without one."""
    lines = (line.strip() for line in text.splitlines())
    header = _PACKAGE.fullmatch(next((line for line in lines if line), ""))
    return header[1] if header else None
