"""Hydra plug-ins: a config source that serves checked files, generated layouts and recipes, and its search path.

Hydra makes its sources itself, from the search path; the files of the composition under way are in a context variable.
"""

from __future__ import annotations

from contextvars import ContextVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from megalaunch.config.hydra.nodes import ConfigNodes

SCHEME = "megalaunch"


SERVED: ContextVar[ConfigNodes | None] = ContextVar("SERVED", default=None)
"""The configs that the source serves in this context; None: it serves nothing, and Hydra is as without it."""


class MegalaunchSource(ConfigSource):
    """Serves the configs in `SERVED` under `megalaunch://`; it keeps them where a launcher plug-in sends it."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._served = SERVED.get()

    def __deepcopy__(self, memo: dict[int, object]) -> MegalaunchSource:
        """Return the source itself: Hydra copies its sources, and the files' problems belong to one composition."""
        return self

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the search path's entry."""
        return SCHEME

    def available(self) -> bool:
        """Return True in a composition of ours."""
        return self._served is not None

    def is_group(self, config_path: str) -> bool:
        """Return True for a config group."""
        return self._served is not None and bool(self._served.names(config_path.rstrip("/")))

    def is_config(self, config_path: str) -> bool:
        """Return True for a config, also one without a file: a layout name or a model folder."""
        return self._served is not None and self._served.node(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of a group's configs."""
        if self._served is None or results_filter is ObjectType.GROUP:
            return []
        return sorted(self._served.names(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a config as an OmegaConf container."""
        node = self._served.node(config_path) if self._served is not None else None
        assert node is not None, "Hydra asks is_config first"
        return ConfigResult(
            provider=self.provider,
            path=f"{SCHEME}://{config_path}",
            config=OmegaConf.create(dict(node.content)),
            header={"package": node.package},
        )


class MegalaunchSearchPath(SearchPathPlugin):
    """Puts `megalaunch://` on the search path of our own compositions, and of no other Hydra application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append a source for each folder; they all serve the same configs, so that the first one answers."""
        served = SERVED.get()
        for folder in served.search_path() if served is not None else ():
            search_path.append("megalaunch", f"{SCHEME}://{folder}")
