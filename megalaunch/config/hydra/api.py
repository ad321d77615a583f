"""Compose with Hydra: the files that are served, the overrides, and the schema as a structured config."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf, open_dict

from megalaunch.config.hydra.nodes import ConfigNodes
from megalaunch.config.hydra.resolve import register_resolvers
from megalaunch.config.hydra.source import SERVED, MegalaunchSearchPath, MegalaunchSource
from megalaunch.config.hydra.structured import NAME, structured_run_spec

PRIMARY = "config"
"""The primary config: conf/config.yaml."""

_OWN_GROUPS = ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
"""Config groups that the defaults list of Hydra's own node picks: a quarter of the time of a composition."""


@dataclass(frozen=True)
class Composed:
    """What Hydra composed: the config of the run, and Hydra's own node."""

    config: DictConfig
    hydra: DictConfig

    @property
    def choices(self) -> dict[str, str]:
        """The option of each config group, Hydra's own groups omitted."""
        chosen = OmegaConf.to_container(self.hydra.runtime.choices)
        assert isinstance(chosen, dict)
        return {str(group): option for group, option in chosen.items() if option and "hydra/" not in str(group)}

    @contextmanager
    def with_values(self, values: Mapping[str, Any]) -> Iterator[DictConfig]:
        """Within the context, the run's config has values by key, as Hydra sets the value of an override.

        They are set in copies of the sections of the keys, and the sections themselves are put back as they were:
        OmegaConf would copy and type every leaf of an assigned section, for most of the time of a composition.
        """
        content = self.config.__dict__["_content"]
        before = {name: content[name] for name in {key.partition(".")[0] for key in values} if name in content}
        try:
            content |= copy.deepcopy(before)
            for key, value in values.items():
                OmegaConf.update(self.config, key, value)
            yield self.config
        finally:
            content |= before


def compose_config(nodes: ConfigNodes, choices: Sequence[str], further: Sequence[str]) -> Composed:
    """Compose the files that the overrides choose; raises HydraException.

    Of Hydra's own node only the choices are used. Its groups are omitted, unless `further` overrides, or a file that
    they add, may set something there.
    """
    omitted = [] if further else [f"~hydra/{group}" for group in _OWN_GROUPS]
    with hydra_initialized(nodes):
        config = hydra.compose(PRIMARY, [*choices, *further, *omitted], return_hydra_config=True)
    with open_dict(config):
        own = config.pop("hydra")
    return Composed(config, own)


def print_config(nodes: ConfigNodes, overrides: Sequence[str], kind: str) -> None:
    """Print the composed config as `--cfg` of a Hydra application does: `job`, `hydra` or `all`."""
    with hydra_initialized(nodes) as own:
        own.show_cfg(PRIMARY, list(overrides), kind, package=None)


def print_info(nodes: ConfigNodes, overrides: Sequence[str], topic: str) -> None:
    """Print what `--info` of a Hydra application does: `defaults-tree`, `searchpath`, `plugins` and more."""
    logging.raiseExceptions = False  # Hydra prints by logging, which shows a traceback a line after `| head`
    with hydra_initialized(nodes) as own:
        own.show_info(topic, PRIMARY, list(overrides))


@contextmanager
def hydra_initialized(nodes: ConfigNodes) -> Iterator[Hydra]:
    """Initialize Hydra for our configs, also within an application that uses Hydra too."""
    _register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    token = SERVED.set(nodes)
    try:
        with hydra.initialize(config_path=None, job_name="megalaunch", version_base="1.3"):
            own = GlobalHydra.instance().hydra
            assert own is not None, "initialize makes it"
            yield own
    finally:
        SERVED.reset(token)
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


@cache
def _register() -> None:
    """Register schema, resolvers and plug-ins, once a process."""
    register_resolvers()
    ConfigStore.instance().store(name=NAME, node=structured_run_spec(), provider="megalaunch")
    for plugin in (MegalaunchSource, MegalaunchSearchPath):
        Plugins.instance().register(plugin)
