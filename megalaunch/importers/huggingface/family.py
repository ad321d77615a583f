"""A model family: its keys of config.json, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.schema import model as schema
from megalaunch.schema.model import ModelSpec

Values: TypeAlias = dict[str, Any]
"""Fields of a ModelSpec by name; `rope` is a dict of the fields of its section."""


@dataclass(frozen=True)
class FamilySpec:
    """One family: its names in config.json, and functions that read and write its keys."""

    name: schema.Family
    model_type: str
    architecture: str
    read: Callable[[ConfigFile], Values]
    write: Callable[[ModelSpec], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of keys that published files omit."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys, which some versions of transformers write: other name to name."""
    multimodal_type: str | None = None
    """model_type of the multimodal model that contains this family's decoder."""


def invert(names: Mapping[str, schema.Activation]) -> dict[schema.Activation, str]:
    """Invert a map; the first of several names for an activation wins."""
    return {activation: name for name, activation in reversed(list(names.items()))}
