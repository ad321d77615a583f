"""What is given to Hydra to compose: configs by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class ConfigNode:
    """The content of one config, defaults list included, and the package at which Hydra merges it.

    `package` is None for the package that the config group implies.
    """

    content: Mapping[str, Any]
    package: str | None = None


class ConfigNodes(Protocol):
    """Configs by path: `config`, `model/llama3_8b`, `parallel/tp4pp4`, `recipe/quickstart`."""

    def search_path(self) -> Sequence[Path]:
        """Return the folders in which configs are looked up."""

    def node(self, path: str) -> ConfigNode | None:
        """Return a config; None if it does not exist."""

    def names(self, group: str) -> Sequence[str]:
        """Return the configs of a group, by name; empty if it is no group."""
