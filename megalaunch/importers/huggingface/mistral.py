"""Mistral 7B and similar models: Llama with an optional sliding window in all layers."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    window = file.integer("sliding_window", 4096, null=None)
    return read_common(file) | {"sliding_window": window, "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_common(model) | {"sliding_window": model.sliding_window} | write_rope(model.rope)


FAMILY = FamilySpec("mistral", "mistral", "MistralForCausalLM", _read, _write)
