"""Gemma 3: Llama's tensor names, with other prefixes in a multimodal model."""

from __future__ import annotations

from megalaunch.engine.weight_maps.llama import tensors
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, Multimodal

_MULTIMODAL = Multimodal(
    layouts=(
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        {"model.": "model.language_model."},
    ),
    vision=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)

WEIGHTS = FamilyWeights(tensors, multimodal=_MULTIMODAL)
