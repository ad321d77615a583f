"""The same files merged by Hydra itself: what our composition is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalaunch.config.compose import _primary_options
from megalaunch.config.groups import load_option
from megalaunch.config.keys import GROUPS, schema_defaults
from megalaunch.config.recipes import Recipe, load_chain
from megalaunch.schema import RunSpec, build_run_spec
from megalaunch.schema.paths import put


def hydra_compose(recipe: str, options: Mapping[str, str]) -> RunSpec:
    """The spec of `recipe=... GROUP=OPTION ...` as Hydra picks and merges the options and the recipe's values."""
    from hydra import compose, initialize
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store, chain, primary = ConfigStore.instance(), load_chain(recipe, "", []), _primary_options()
    store.store(name="root", node={"defaults": ["_self_", *({group: option} for group, option in primary.items())]})
    used = [(g, o) for r in chain for g, (o, _) in r.options.items()] + [*primary.items(), *options.items()]
    for group, option in used:
        if group != "recipe" and option:
            values = load_option(group, option, "", [])
            store.store(group=group, name=option, node=nested(values.values).get(group, {}), package=group)
    for entry, node in zip(chain, nodes(chain), strict=True):
        *folder, name = entry.name.split("/")
        store.store(group="/".join(["recipe", *folder]), name=name, node=node, package="_global_")
    overrides = [f"recipe={recipe}", *(f"{group}={option}" for group, option in options.items())]
    with initialize(version_base="1.3", config_path=None):
        config = compose(config_name="root", overrides=overrides)
    merged: Any = OmegaConf.merge(OmegaConf.create(schema_defaults()), config)
    data = {key: value for key, value in OmegaConf.to_container(merged).items() if key in schema_defaults()}
    return build_run_spec(data)


def nodes(chain: Sequence[Recipe]) -> list[dict[str, Any]]:
    """Recipes as Hydra takes them: parents once each and in order, the options of the whole chain in the last."""
    made: list[dict[str, Any]] = []
    known: set[str] = set()
    included: set[str] = set()
    for recipe in chain:
        parents = [parent for parent in recipe.parents if parent in known and parent not in included]
        included.update(parents)
        known.add(recipe.name)
        defaults: list[Any] = [f"/recipe/{parent}" for parent in parents]
        if recipe is chain[-1]:
            options = {group: option for entry in chain for group, (option, _) in entry.options.items()}
            defaults += [{f"override /{group}": option} for group, option in options.items() if group in GROUPS]
        made.append({"defaults": [*defaults, "_self_"], **nested(recipe.body.values)})
    return made


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dotted keys as nested mappings."""
    data: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        put(data, path, value)
    return data
