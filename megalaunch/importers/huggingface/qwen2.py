"""Qwen2 and Qwen2.5: QKV biases; sliding windows from some layer on, which published models do not use."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.importers.huggingface.sliding_window import read_windows, write_windows
from megalaunch.schema.model import ModelSpec


def read_qwen_windows(file: ConfigFile) -> Values:
    """Read the windows: from layer `max_window_layers` on in Qwen, in all layers or none in this project."""
    enabled, width = file.flag("use_sliding_window", False), file.integer("sliding_window", 4096, null=None)
    first, layers = file.pop("max_window_layers", 28), file.pop("num_hidden_layers", 0) or 0
    if enabled and width and file.pop("layer_types", None) is None and isinstance(first, int) and 0 < first < layers:
        file.problems.append(
            f"config.json: max_window_layers {first} is not supported: windows are in all layers or all but every n-th"
        )
    none = not enabled or (isinstance(first, int) and first >= layers and file.pop("layer_types", None) is None)
    return read_windows(file, None if none else width)


def write_qwen_windows(model: ModelSpec) -> dict[str, Any]:
    """Write the windows with `max_window_layers` 0: `layer_types` selects the layers."""
    windows = write_windows(model)
    return windows | {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0}


def _read(file: ConfigFile) -> Values:
    return read_common(file) | read_qwen_windows(file) | {"qkv_bias": True, "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_common(model) | write_qwen_windows(model) | write_rope(model.rope)


FAMILY = FamilySpec("qwen2", "qwen2", "Qwen2ForCausalLM", _read, _write)
