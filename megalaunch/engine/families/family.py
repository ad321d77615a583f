"""What a family file holds: the words of config.json both ways, and the tensors both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megalaunch.config.schema import model as schema
from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.multimodal import Multimodal
from megalaunch.engine.families.pairs import Pair

Values: TypeAlias = dict[str, Any]
"""Fields of a ModelSpec by name; `rope` a dictionary of those of its section."""


@dataclass(frozen=True)
class FamilyFile:
    """One family; `prefix` is what older files leave out before all names but the head's."""

    name: schema.Family
    model_type: str
    architecture: str
    read: Callable[[ConfigFile], Values]
    write: Callable[[ModelSpec], dict[str, Any]]
    tensors: Callable[[ModelSpec], Iterator[Pair]]
    prefix: str = ""
    dropped: tuple[str, ...] = field(default=(".rotary_emb.inv_freq",))
    """Endings of stored tensors that hold nothing learned: they are computed again."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values of keys that published files leave out."""
    multimodal: Multimodal | None = None
    """The model of text and images that this family's decoder is a part of."""


def inverse(words: Mapping[str, schema.Activation]) -> dict[schema.Activation, str]:
    """The first word of each meaning."""
    return {meaning: word for word, meaning in reversed(list(words.items()))}
