"""Gemma 2: soft caps, pre- and post-norms, sliding window in every second layer, scaled embeddings."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.importers.huggingface.sliding_window import read_windows, write_windows
from megalaunch.schema.model import ModelSpec


def read_gemma(file: ConfigFile, caps: tuple[float | None, float | None], every: int) -> Values:
    """Read the keys that Gemma 2 and 3 share.

    Args:
        file: the config.json.
        caps: default soft caps of attention scores and logits.
        every: every `every`-th layer has full attention; the others have a sliding window.
    """
    if file.pop("use_bidirectional_attention", None):
        file.problems.append(
            "config.json: use_bidirectional_attention is not supported: a decoder has causal attention"
        )
    if file.pop("hidden_act", None) is not None and file.pop("hidden_activation", None) is None:
        file.problems.append(
            "config.json: hidden_act has no effect without hidden_activation; gemma uses gelu_pytorch_tanh"
        )
    shape = read_common(
        file, tied=True, head_dim=256, activation_key="hidden_activation", activation="gelu_pytorch_tanh"
    )
    windows = read_windows(file, file.integer("sliding_window", 4096, null=None), every)
    own = {
        "norm_placement": "both",
        "norm_plus_one": True,
        "scale_embeddings": True,
        "query_pre_attn_scalar": float(file.number("query_pre_attn_scalar", 256) or 256),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", caps[0], null=None),
        "final_logit_softcapping": file.number("final_logit_softcapping", caps[1], null=None),
    }
    return shape | read_biases(file) | windows | own


def write_gemma(model: ModelSpec) -> dict[str, Any]:
    """Write the keys that Gemma 2 and 3 share."""
    scale = model.query_pre_attn_scalar or model.head_dim or 256
    own = {
        "attention_bias": model.qkv_bias,
        "query_pre_attn_scalar": int(scale) if float(scale).is_integer() else scale,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
    }
    windows = write_windows(model)
    if windows["sliding_window"] is None:  # transformers requires a number, even if no layer has a window
        windows["sliding_window"] = 4096
    return write_common(model, "hidden_activation") | own | windows


def _read(file: ConfigFile) -> Values:
    return read_gemma(file, caps=(50.0, 30.0), every=2) | {"rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_gemma(model) | write_rope(model.rope)


FAMILY = FamilySpec("gemma2", "gemma2", "Gemma2ForCausalLM", _read, _write)
