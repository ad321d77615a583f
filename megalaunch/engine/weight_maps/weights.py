"""The weights of every supported family (those of megalaunch/importers/huggingface/registry.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.engine.weight_maps import deepseek, gemma3, gpt, gpt_neox, gpt_oss, llama, mixtral, phi3
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, Multimodal
from megalaunch.importers.huggingface.registry import FamilyError, family_of, multimodal_family
from megalaunch.schema.model import Family, ModelSpec

_WEIGHTS: Mapping[Family, FamilyWeights] = {
    "gpt": gpt.WEIGHTS,
    "gpt_neox": gpt_neox.WEIGHTS,
    "phi3": phi3.WEIGHTS,
    "gemma3": gemma3.WEIGHTS,
    "mixtral": mixtral.MIXTRAL,
    "gpt_oss": gpt_oss.WEIGHTS,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), deepseek.WEIGHTS),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), mixtral.WEIGHTS),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "olmo2"), llama.WEIGHTS),
}


def get_family_weights(model: ModelSpec) -> FamilyWeights:
    """Return the weights of a model's family. Raises FamilyError if the family has none."""
    name = family_of(model).name
    if name not in _WEIGHTS:
        raise FamilyError([f"weights of family {name} cannot be converted yet: its config.json is read, no tensor is"])
    return _WEIGHTS[name]


def get_multimodal(config: Mapping[str, Any]) -> Multimodal | None:
    """Return the tensor names of a multimodal config.json; None for a language model."""
    family = multimodal_family(config)
    return None if family is None else _WEIGHTS[family.name].multimodal
