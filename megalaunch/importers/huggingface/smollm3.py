"""SmolLM3: Llama without rotary embedding in every n-th layer."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile, every_nth
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.importers.huggingface.sliding_window import read_windows, write_windows
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    every, rotated = file.integer("no_rope_layer_interval", 4), file.pop("no_rope_layers", None)
    file.ignore("max_window_layers", "SmolLM3 has windows in all layers or none")
    if isinstance(rotated, list):  # 1 means rotated, in spite of the key's name
        every = every_nth([not mark for mark in rotated], "NoPE", file.problems)
    windowed = file.flag("use_sliding_window", False)
    width = file.integer("sliding_window", None, null=None)
    if windowed and width and file.pop("layer_types", None) is None:
        file.problems.append("config.json: sliding windows in NoPE layers only are not supported")
    shape = read_common(file, tied=True) | read_biases(file) | read_windows(file, width if windowed else None)
    bias = file.flag("mlp_bias", False)
    return shape | {"mlp_bias": bias, "no_rope_layer_interval": every, "rope": read_rope(file, 2e6)}


def _write(model: ModelSpec) -> dict[str, Any]:
    rotated = [int(layer.rotated) for layer in list_layers(model) if not layer.mtp]
    own = {
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "no_rope_layers": rotated,
        "no_rope_layer_interval": model.no_rope_layer_interval or model.num_layers + 1,
        "use_sliding_window": model.sliding_window is not None,
    }
    return write_common(model) | own | write_windows(model) | write_rope(model.rope)


FAMILY = FamilySpec("smollm3", "smollm3", "SmolLM3ForCausalLM", _read, _write)
