"""Mistral 7B and what is built like it: a Llama whose layers may all see a window only."""

from __future__ import annotations

from typing import Any

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values
from megalaunch.engine.families.llama import read_shape, tensors, write_shape
from megalaunch.engine.families.rope_keys import read_rope, write_rope


def _read(file: ConfigFile) -> Values:
    window = file.integer("sliding_window", 4096, null=None)
    return read_shape(file) | {"sliding_window": window, "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_shape(model) | {"sliding_window": model.sliding_window} | write_rope(model.rope)


FAMILY = FamilyFile("mistral", "mistral", "MistralForCausalLM", _read, _write, tensors)
