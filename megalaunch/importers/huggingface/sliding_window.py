"""Sliding windows in config.json: one width, and a list of the layers that have it."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import Values
from megalaunch.importers.huggingface.hf_config import ConfigFile, every_nth
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(file: ConfigFile, width: int | None, every: int | None = None) -> Values:
    """Read sliding_window and sliding_window_pattern.

    Args:
        file: the config.json.
        width: window of the layers that have one.
        every: without a `layer_types` list, every `every`-th layer has full attention; None: all layers have
            the window.
    """
    types = file.pop("layer_types", None)
    layers = file.pop("num_hidden_layers", None)
    if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
        file.problems.append(f"config.json: layer_types has {len(types)} layers, but num_hidden_layers is {layers}")
    if types is None and every is not None and width is None:
        file.problems.append("config.json: sliding_window is null, but this family has sliding-window layers")
    if types is None:
        return {"sliding_window": width, "sliding_window_pattern": every if width else None}
    if not isinstance(types, list) or not all(kind in (_SLIDING, _FULL) for kind in types):
        file.problems.append(f"config.json: layer_types may only contain {_SLIDING} and {_FULL}")
        return {}
    if _SLIDING not in types:
        return {"sliding_window": None}
    if width is None:
        file.problems.append("config.json: layer_types has sliding_attention, but there is no sliding_window")
    return {
        "sliding_window": width,
        "sliding_window_pattern": every_nth([kind == _FULL for kind in types], "full attention", file.problems),
    }


def write_windows(model: ModelSpec) -> dict[str, Any]:
    """Write the width and the `layer_types` list."""
    types = [_FULL if layer.window is None else _SLIDING for layer in list_layers(model) if not layer.mtp]
    return {"sliding_window": model.sliding_window, "layer_types": types}
