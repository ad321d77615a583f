"""Convert the arguments saved in a Megatron checkpoint to a model section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.megatron.arguments import flag_keys, known_flags, parse_arguments
from megalaunch.importers.megatron.flag_table import DIRECT, EXPERTS, LATENT, MANY
from megalaunch.importers.megatron.model_values import model_values
from megalaunch.schema.build import SpecError, build_section
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.paths import put

# Arguments of models that the decoder cannot express, with the values that leave it as it is.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "mtp_use_repeated_layer": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "rotary_interleaved": (None, False),
    "qk_l2_norm": (None, False),
    "use_mup": (None, False),
    "softmax_type": (None, "vanilla"),
    "glu_linear_offset": (None, 0, 0.0),
    "quick_geglu": (None, False),
    "moe_latent_size": (None, 0),
    "moe_apply_probs_on_input": (None, False),
    "moe_router_topk_limited_devices": (None, 0),
}
# The same with latent attention.
_PLAIN_LATENT: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "rope"),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (None, False),
}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


class ArgumentsError(ValueError):
    """The saved arguments describe no supported model; `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def model_from_saved(saved: Mapping[str, Any], name: str) -> ModelSpec:
    """Convert saved arguments to a model section. Raises ArgumentsError that lists every unsupported argument."""
    latent = bool(saved.get("multi_latent_attention"))
    refused = {key: "such models cannot be imported" for key, plain in _PLAIN.items() if saved.get(key) not in plain}
    for key, plain in _PLAIN_LATENT.items() if latent else ():
        if saved.get(key) not in plain:
            refused[key] = f"with --multi-latent-attention it must be {plain[-1]}"
    problems = [f"--{key.replace('_', '-')} {saved.get(key)}: {reason}" for key, reason in refused.items()]
    problems += [f"the saved arguments have no {key}" for key in _NEEDED if not isinstance(saved.get(key), int)]
    if problems:
        raise ArgumentsError(problems)
    given = parse_arguments(_as_arguments(saved))
    values = {"model.max_position_embeddings": 2048, **_direct(saved), **model_values(given)}
    unsupported = [f"--{flag}: {text}" for flag, (status, text) in given.statuses.items() if status == "unsupported"]
    if unsupported:
        raise ArgumentsError(unsupported)
    values["model.norm_plus_one"] = bool(saved.get("apply_layernorm_1p"))
    heads, groups = saved["num_attention_heads"], values.get("model.num_query_groups")
    values["model.num_query_groups"] = heads if latent else groups or heads
    if latent:
        values["model.head_dim"] = values["model.mla.qk_nope_head_dim"] + values["model.mla.qk_rope_head_dim"]
    else:
        values["model.head_dim"] = saved.get("kv_channels") or saved["hidden_size"] // heads
    section: dict[str, Any] = {"model": {"name": name}}
    for key, value in values.items():
        put(section, key, value)
    try:
        return build_section(ModelSpec, section["model"], "model.")
    except SpecError as error:
        raise ArgumentsError([str(error)]) from error


def _as_arguments(saved: Mapping[str, Any]) -> list[str]:
    """Return the model flags that give the saved values; None and False mean that a flag was not given."""
    arguments: list[str] = []
    for flag, arity in known_flags().items():
        value = saved.get(flag.replace("-", "_"))
        if not any(key.startswith("model.") for key in flag_keys(flag)) or value in (None, False, "None"):
            continue
        arguments.append(f"--{flag}")
        if arity:
            arguments += [str(item) for item in value] if isinstance(value, list) and arity == MANY else [str(value)]
    if saved.get("add_bias_linear") is False:
        arguments.append("--disable-bias-linear")
    if not saved.get("bias_gelu_fusion"):
        arguments.append("--no-bias-gelu-fusion")
    return arguments


def _direct(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model that one argument sets by itself."""
    latent = bool(saved.get("multi_latent_attention"))
    rows = [*DIRECT, *(EXPERTS if saved.get("num_experts") else ()), *(LATENT if latent else ())]
    found = {}
    for flag, key, _, default in rows:
        value = saved.get(flag.replace("-", "_"))
        value = default if value is None else value
        if value is None or not key.startswith("model."):
            continue
        if key.startswith("model.mtp.") and not saved.get("mtp_num_layers"):
            continue
        found[key] = value
    return found
