"""Multimodal models (text and images): only the text decoder is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.huggingface.hf_config import ConfigFile

TEXT, VISION = "text_config", "vision_config"
TEXT_DECODER_ONLY = "the model is multimodal: only its text decoder is read"


def split_config(config: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], ConfigFile]:
    """Split a multimodal config into the decoder's keys (as a config.json of type `model_type`) and the other keys."""
    file = ConfigFile(config)
    text = file.pop(TEXT, None)
    if text is None:
        text = {}  # transformers then uses the text decoder's defaults
    if not isinstance(text, Mapping):
        file.problems.append(f"config.json: {TEXT} is {text!r:.80}, must be an object or null")
        text = {}
    if text.get("model_type", model_type) != model_type:
        file.problems.append(f"config.json: {TEXT} has model_type {text['model_type']!r}, not {model_type!r}")
    for key in (VISION, "mm_tokens_per_image"):
        file.ignore(key, "only the text decoder is read")
    file.pop("initializer_range", None)  # ignored as in METADATA: the weights exist already
    # tie_word_embeddings is read from the outer config, whatever text_config contains.
    outer = {"model_type": model_type, "tie_word_embeddings": file.pop("tie_word_embeddings", True)}
    outer |= {key: config[key] for key in ("bos_token_id", "eos_token_id", "use_cache") if key in config}
    file.reject_unknown_keys()
    return {**text, **outer}, file
