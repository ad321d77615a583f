"""Read the model section from a Hugging Face folder, with the position of each value and notes on ignored keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalaunch.importers.huggingface.folder import CONFIG, FolderError, other_format, parse_json, read_text
from megalaunch.importers.huggingface.json_positions import key_positions
from megalaunch.importers.huggingface.multimodal import TEXT
from megalaunch.importers.huggingface.registry import FamilyError, from_hf_config
from megalaunch.importers.huggingface.rope import FIELD_OF
from megalaunch.schema import SpecProblem
from megalaunch.schema.remote import is_hub_address

_OWN_SHAPE = "take another folder, or write the shape yourself as conf/model/NAME.yaml and choose model=NAME"
# Field of the model section: the keys that can set it, the first match wins.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "family": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "activation": ("hidden_activation", "hidden_act", "activation_function"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "parallel_residual": ("use_parallel_residual",),
    "qkv_bias": ("attention_bias",),
    "attention_output_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "sliding_window": ("sliding_window",),
    "sliding_window_pattern": ("layer_types", "sliding_window_pattern"),
    "no_rope_layer_interval": ("no_rope_layers", "no_rope_layer_interval"),
    "query_pre_attn_scalar": ("query_pre_attn_scalar",),
    "swiglu_limit": ("swiglu_limit",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "hidden_dropout": ("resid_pdrop", "hidden_dropout"),
    "embedding_dropout": ("embd_pdrop",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "init_std": ("initializer_range",),
    "moe.num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.ffn_hidden_size": ("moe_intermediate_size",),
    "moe.shared_ffn_hidden_size": ("shared_expert_intermediate_size", "n_shared_experts"),
    "moe.first_k_dense_replace": ("first_k_dense_replace", "mlp_only_layers"),
    "moe.layer_freq": ("decoder_sparse_step", "moe_layer_freq"),
    "moe.score": ("scoring_func",),
    "moe.normalize_top_k": ("norm_topk_prob",),
    "moe.scaling_factor": ("routed_scaling_factor",),
    "moe.balance_bias": ("topk_method",),
    "moe.num_groups": ("n_group",),
    "moe.top_k_groups": ("topk_group",),
    "moe.group_score_top_k": ("topk_method",),
    "moe.balance_loss": ("seq_aux",),
    "moe.balance_loss_coeff": ("router_aux_loss_coef", "aux_loss_alpha"),
    "moe.input_jitter": ("router_jitter_noise",),
    "mtp.num_layers": ("num_nextn_predict_layers",),
    **{
        f"mla.{key}": (key,)
        for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    },
    "rope.theta": (
        *("rope_scaling.rope_theta", "rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta"),
        *("rope_theta", "rotary_emb_base"),
    ),
    "rope.window_theta": ("rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq"),
    "rope.fraction": (
        *("rope_scaling.partial_rotary_factor", "rope_parameters.partial_rotary_factor"),
        *("partial_rotary_factor", "rotary_pct"),
    ),
    **{
        f"rope.{ours}": tuple(
            f"{section}.{theirs}"
            for section in ("rope_scaling", "rope_parameters", "rope_parameters.full_attention")
            for theirs in keys
        )
        for ours, keys in {
            "scaling": ("rope_type", "type"),
            "mscale": ("mscale",),
            "mscale_all_dim": ("mscale_all_dim",),
            **{ours: (theirs,) for theirs, ours in FIELD_OF.items()},
        }.items()
    },
}


class ModelFolderError(ValueError):
    """A folder has no usable model section; `problems` has every reason with its position."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


@dataclass(frozen=True)
class ModelSection:
    """Fields by dotted path below `model`, the `file:line:column` of each, and notes on keys without effect."""

    values: Mapping[str, Any]
    positions: Mapping[str, str]
    notes: tuple[str, ...]


def read_model_section(folder: Path, shown: str, name: str | None = None) -> ModelSection:
    """Read a folder's model section. Raises ModelFolderError.

    Args:
        folder: The folder.
        shown: Its name in messages.
        name: The model's name; None: the folder's.
    """
    config_shown = f"{shown}/{CONFIG}" if is_hub_address(shown) else str(Path(shown) / CONFIG)
    try:
        refused = other_format(folder) or _no_config(folder, shown)
        text = "" if refused else read_text(folder / CONFIG)
        config = {} if refused else parse_json(folder / CONFIG, text)
    except FolderError as error:
        position = f"{config_shown}:{error.line}:{error.column}" if error.line else config_shown
        raise ModelFolderError([SpecProblem("model", f"{error}; copy or download it again", position)]) from error
    if refused:
        raise ModelFolderError([SpecProblem("model", refused)])
    by_key = key_positions(text)
    notes: list[str] = []
    try:
        model = from_hf_config(config, name or folder.resolve().name, notes)
    except FamilyError as error:
        raise ModelFolderError([_locate(problem, by_key, config_shown) for problem in error.problems]) from error
    values = dict(_leaves(asdict(model)))
    positions = {path: _position(_KEYS.get(path, ()), by_key, config_shown) for path in values}
    return ModelSection(values, positions, tuple(f"{config_shown}{note.removeprefix('config.json')}" for note in notes))


def _no_config(folder: Path, shown: str) -> str | None:
    """Return why a path has no config.json, with the folder that was probably meant; None if it has one."""
    if folder.is_file():
        if folder.name == CONFIG:
            return f"{shown} is a file; name the folder: model={Path(shown).parent}"
        return f"{shown} is a file; name a Hugging Face folder with a {CONFIG}"
    if (folder / CONFIG).is_file():
        return None
    found = [path.parent for inside in ("*", "snapshots/*") for path in sorted(folder.glob(f"{inside}/{CONFIG}"))]
    hint = f"; name the folder that has the model's {CONFIG}"
    if found:
        hint = f"; did you mean model={shown.rstrip('/')}/{found[0].relative_to(folder)}?"
    return f"the folder {shown} has no {CONFIG}{hint}"


def _locate(problem: str, by_key: Mapping[str, tuple[int, int]], shown: str) -> SpecProblem:
    """Return a SpecProblem with the position of the key that `problem` begins with, and a fix."""
    key = re.match(r"config\.json: (\w+)", problem)
    position = _position((key.group(1),) if key else (), by_key, shown)
    if re.search(r"unknown to this family|not supported", problem):
        return SpecProblem("model", f"{problem}; {_OWN_SHAPE}", position)
    if "quantised" in problem:
        return SpecProblem("model", problem, position)
    return SpecProblem("model", f"{problem}; repair the file, or copy it again", position)


def _position(keys: tuple[str, ...], by_key: Mapping[str, tuple[int, int]], shown: str) -> str:
    """Return `file:line:column` of the first key that the file has, else the file."""
    for key in keys:
        for path in (key, f"{TEXT}.{key}"):
            if path in by_key:
                line, column = by_key[path]
                return f"{shown}:{line}:{column}"
    return shown


def _leaves(section: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        found += _leaves(value, f"{before}{name}.") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return found
