"""Verify the reading of a config.json: compare a shrunk model in transformers with the same in this engine.

Only sizes are reduced (layers, heads, vocabulary, windows). All other keys are unchanged, so a key that is misread
changes the logits, whatever the size of the real model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder, is_huggingface
from megalaunch.engine.checkpoint.import_transformers import import_transformers
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.weight_maps.weight_mapping import stored_name
from megalaunch.engine.weight_maps.weights import get_family_weights, get_multimodal
from megalaunch.importers.huggingface.multimodal import TEXT, TEXT_DECODER_ONLY, VISION
from megalaunch.importers.huggingface.registry import family_of, from_hf_config, get_text_config
from megalaunch.schema.model import ModelSpec

_LAYERS, _HEADS, _VOCABULARY, _WINDOW, _LENGTH, _HIDDEN = 2, 4, 211, 11, 40, 256
_TOLERANCE = 1e-4  # relative to the largest logit; measured: 1e-6 to 6e-6
_GPT2 = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "intermediate_size": "n_inner"}
_GPT2 |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
# Routers, and the projections of normed latents to queries and keys (latent attention).
_OF_NORMED_INPUT = (".gate.weight", ".router.weight", ".q_b_proj.weight", ".kv_b_proj.weight")
# The smallest vision_config that transformers builds: only the text decoder is compared.
_SMALLEST_VISION = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"), 1),
    **{"image_size": 2, "patch_size": 1, "vision_use_head": False},
}


@dataclass(frozen=True)
class Verification:
    """Result of the comparison with transformers; `reason` says why there was none."""

    reader: str | None
    difference: float = 0.0
    tolerance: float = 0.0
    layers: int = 0
    last_position: int = 0
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """True if both models give the same logits; False for NaN."""
        return self.reader is not None and self.difference <= self.tolerance


def verify_config(config: Mapping[str, Any]) -> Verification:
    """Compare the logits of the shrunk model in transformers and in this engine.

    Raises:
        FamilyError: as `from_hf_config`.
        CheckpointError: a parameter has another shape in transformers.
    """
    from_hf_config(config, "twin")
    if find_spec("transformers") is None:
        return Verification(None, reason="transformers is not installed")
    transformers = import_transformers()
    reader = f"transformers {transformers.__version__}"
    small = shrink_config(config)
    model = from_hf_config(small, "twin")
    samples = _samples(model)
    try:
        theirs = _their_model(transformers, small)
        expected = [_their_logits(theirs, *sample) for sample in samples]
    except Exception as error:  # any exception: a class of transformers may raise anything for a file that it refuses
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Verification(None, reason=f"{reader} rejects the config.json: {reason:.200}")
    ours = _our_model(model, small, {name: value.detach() for name, value in theirs.state_dict().items()})
    with torch.no_grad():
        worst = [
            (ours(tokens_BS, positions).float() - logits).abs().max().item()
            for (tokens_BS, positions), logits in zip(samples, expected, strict=True)
        ]
    return Verification(
        reader,
        next((value for value in worst if math.isnan(value)), max(worst)),
        _TOLERANCE * max(1.0, *(logits.abs().max().item() for logits in expected)),
        model.num_layers,
        int(samples[-1][1][-1]),
    )


def describe_verification(source: Path) -> str | None:
    """Return a sentence about whether transformers reads a folder's config.json alike; None for other sources.

    Raises CheckpointError if transformers reads it differently.
    """
    if not is_huggingface(source):
        return None
    config = HuggingFaceFolder(source).config
    found = verify_config(config)
    require_agreement(found, "the run is not started")
    note = "" if get_multimodal(config) is None else f"; {TEXT_DECODER_ONLY}"
    if not found.agrees:
        return f"the config.json of {source} is not verified: {found.reason}{note}"
    evidence = "same logits of a small model with its keys"
    return f"the config.json of {source} is read as by {found.reader} ({evidence}){note}"


def require_agreement(verification: Verification, consequence: str) -> None:
    """Raise CheckpointError if transformers reads the config.json differently; `consequence` ends the message."""
    if verification.reader is not None and not verification.agrees:
        raise CheckpointError(
            f"{verification.reader} reads this config.json differently: logits of a small model with its keys differ "
            f"by {verification.difference:.3g}, the tolerance is {verification.tolerance:.3g}; {consequence}. "
            "Please report the file"
        )


def shrink_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with few layers, few heads of the same width, a small vocabulary and short windows."""
    model, text = from_hf_config(config, "whole"), get_text_config(config)
    small = _shrink(text, model)
    if get_multimodal(config) is None:
        return small
    sizes = {key: value for key, value in small.items() if key not in text or text[key] != value}
    return {**config, TEXT: {**(config.get(TEXT) or {}), **sizes}, VISION: _SMALLEST_VISION, "mm_tokens_per_image": 4}


def _shrink(config: Mapping[str, Any], model: ModelSpec) -> dict[str, Any]:
    """Shrink a language model's config; keep the ratio of query heads to KV groups and the pattern of layer types."""
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    common = math.gcd(heads, groups)
    cut = max(part for part in range(1, common + 1) if common % part == 0 and heads // part >= min(heads, _HEADS))
    few = heads // cut
    per_head = max(1, round(model.hidden_size / heads))
    width = config.get("head_dim", family_of(model).defaults.get("head_dim"))
    if isinstance(width, int):  # without head_dim, the head width follows from hidden_size and the number of heads
        per_head = min(per_head, max(1, _HIDDEN // few))
    hidden = per_head * few
    layers = min(model.num_layers, _period(model) + 1 if _period(model) > 1 else _LAYERS)
    if model.moe.num_experts is not None:  # dense layers first: two layers with experts follow
        layers = min(model.num_layers, max(layers, model.moe.first_k_dense_replace + 2))
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": max(8, round(model.ffn_hidden_size * hidden / model.hidden_size)),
        "num_attention_heads": few,
        "num_key_value_heads": groups // cut,
        "vocab_size": min(model.vocab_size or _VOCABULARY, _VOCABULARY),
        "pad_token_id": None,  # an index into the vocabulary; transformers checks only its range
    }
    if model.position_embedding == "learned":
        sizes["max_position_embeddings"] = min(model.max_position_embeddings, _LENGTH + 8)
    if config["model_type"] in ("gpt2", "gpt_neox"):
        del sizes["num_key_value_heads"]  # both have only multi-head attention
    names = _GPT2 if config["model_type"] == "gpt2" else {}
    small = {**config, **{names.get(key, key): value for key, value in sizes.items()}}
    small |= _shrink_experts(config, model, hidden / model.hidden_size)
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(small.get(key), list):
            small[key] = small[key][:layers]
    if small.get("sliding_window") is not None:
        small["sliding_window"] = min(small["sliding_window"], _WINDOW)
    return small


def _shrink_experts(config: Mapping[str, Any], model: ModelSpec, part: float) -> dict[str, Any]:
    """Return the sizes of experts: `part` of their width, and at most 4 experts of a group, or twice top_k of none."""
    moe = model.moe
    if moe.num_experts is None:
        return {}
    few = min(moe.num_experts, 2 * moe.top_k)
    if moe.num_groups is not None:
        few = moe.num_groups * min(moe.num_experts // moe.num_groups, 4)
    sizes: dict[str, Any] = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), few)
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(config.get(key), int):
            sizes[key] = max(8, round(config[key] * part)) if config[key] else 0
    sizes |= {
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
        "quantization_config": None,
    }  # neither is in transformers' modules
    return {key: value for key, value in sizes.items() if key in config}


def _period(model: ModelSpec) -> int:
    """Return the number of layers after which every layer type has occurred."""
    return math.lcm(model.sliding_window_pattern or 1, model.no_rope_layer_interval or 1)


def _samples(model: ModelSpec) -> list[tuple[Tensor, Tensor]]:
    """Return (tokens [B, S], position ids [S]) pairs.

    The first is longer than every window. The second spreads its position ids over all positions of the model; it is
    left out if the first covers them.
    """
    longest = model.max_position_embeddings
    length = min(_LENGTH, longest)
    spread = torch.linspace(0, longest - 1, length, dtype=torch.float64).round().long()
    tokens_BS = torch.randint(0, model.vocab_size or 1, (2, length), generator=_generator())
    dense = (tokens_BS, torch.arange(length))
    return [dense, (tokens_BS.flip(0), spread)] if longest > length else [dense]


def _their_logits(model: Any, tokens_BS: Tensor, positions: Tensor) -> Tensor:
    mask = torch.ones_like(tokens_BS)  # without it, transformers takes jumps in position ids for document boundaries
    with torch.no_grad():
        made = model(tokens_BS, position_ids=positions.expand(2, -1), attention_mask=mask, use_cache=False)
    logits: Tensor = made.logits.float()
    return logits


def _their_model(transformers: Any, config: dict[str, Any]) -> Any:
    """Build the model in transformers with seeded random weights, large enough that every key changes the logits."""
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32, attn_implementation="eager")
    generator = _generator()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.6 - 0.3)
            elif name.endswith(_OF_NORMED_INPUT):  # scores that differ, and do not saturate
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
            else:  # large enough scores that soft caps and scales change the logits
                size = (
                    0.3
                    if "emb" in name or ".wte" in name or ".wpe" in name
                    else 2 / math.sqrt(min(parameter.shape[-2:]))
                )
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(".e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.2 - 0.1)
    return model.eval()


def _our_model(model: ModelSpec, config: Mapping[str, Any], theirs: Mapping[str, Tensor]) -> Any:
    """Build the model in this engine with the weights of transformers' model."""
    multimodal = get_multimodal(config)
    layout = {} if multimodal is None else multimodal.layout(theirs)
    decoder = build_decoder(model).eval()
    parameters = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    named = {"embed_out.weight": theirs["lm_head.weight"], **theirs}  # the name in GPT-NeoX files
    for pair in get_family_weights(model).mappings(model, named):
        found = [named[stored_name(key, layout)] for key in pair.theirs]
        for name, value in zip(pair.ours, pair.to_ours(found), strict=True):
            parameter = parameters.pop(name)
            if parameter.shape != value.shape:
                raise CheckpointError(
                    f"transformers reads this config.json differently: in a small model with its keys {name} is "
                    f"{list(value.shape)} in transformers and {list(parameter.shape)} here. Please report the file"
                )
            parameter.data.copy_(value)
    assert not parameters, f"no tensor of theirs is {', '.join(parameters)}"
    return decoder


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)
