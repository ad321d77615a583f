"""The code that a model folder names in config.json (`auto_map`): never run, but named, as it may compute otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODEL_CLASSES = ("AutoModelForCausalLM", "AutoModel")


def names_own_code(config: Mapping[str, Any]) -> str | None:
    """Return how messages name the code of `auto_map`: the model's class before others; None if there is none."""
    named = config.get("auto_map")
    if not named:
        return None
    if isinstance(named, Mapping):
        named = next((named[key] for key in _MODEL_CLASSES if key in named), next(iter(named.values())))
    return f"own code ({named!r:.80})"
