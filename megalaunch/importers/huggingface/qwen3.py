"""Qwen3: QK norms per head, and a head width independent of the hidden size."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.qwen2 import read_qwen_windows, write_qwen_windows
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    shape = read_common(file, head_dim=128) | read_biases(file) | read_qwen_windows(file)
    return shape | {"qk_norm": "head", "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    biases = {"attention_bias": model.qkv_bias}
    return write_common(model) | biases | write_qwen_windows(model) | write_rope(model.rope)


FAMILY = FamilySpec("qwen3", "qwen3", "Qwen3ForCausalLM", _read, _write)
