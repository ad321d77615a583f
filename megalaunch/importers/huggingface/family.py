"""What a family file holds: its keys of config.json, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megalaunch.config.schema import model as schema
from megalaunch.config.schema.model import ModelSpec
from megalaunch.importers.huggingface.hf_config import ConfigFile

Values: TypeAlias = dict[str, Any]
"""Fields of a ModelSpec by name; `rope` a dictionary of those of its section."""


@dataclass(frozen=True)
class FamilySpec:
    """One family: how config.json names it, and how its keys are read and written."""

    name: schema.Family
    model_type: str
    architecture: str
    read: Callable[[ConfigFile], Values]
    write: Callable[[ModelSpec], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values of keys that published files leave out."""
    multimodal_type: str | None = None
    """model_type of the model of text and images that this family's decoder is a part of."""


def invert(words: Mapping[str, schema.Activation]) -> dict[schema.Activation, str]:
    """The first word of each meaning."""
    return {meaning: word for word, meaning in reversed(list(words.items()))}
