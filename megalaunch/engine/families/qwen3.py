"""Qwen3: a norm of each query's and key's head, and heads of a width of their own."""

from __future__ import annotations

from typing import Any

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values
from megalaunch.engine.families.llama import read_biases, read_shape, tensors, write_shape
from megalaunch.engine.families.qwen2 import read_some_windows, write_some_windows
from megalaunch.engine.families.rope_keys import read_rope, write_rope


def _read(file: ConfigFile) -> Values:
    shape = read_shape(file, head_dim=128) | read_biases(file) | read_some_windows(file)
    return shape | {"qk_norm": "head", "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    biases = {"attention_bias": model.qkv_bias}
    return write_shape(model) | biases | write_some_windows(model) | write_rope(model.rope)


FAMILY = FamilyFile("qwen3", "qwen3", "Qwen3ForCausalLM", _read, _write, tensors)
