"""The registry of families: convert a config.json to a model section, and a model section to a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from megalaunch.importers.huggingface import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from megalaunch.importers.huggingface.family import FamilySpec
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.multimodal import split_config
from megalaunch.importers.huggingface.own_code import names_own_code
from megalaunch.importers.huggingface.rope import fields_without_effect
from megalaunch.plan.attention_factor import attention_factor
from megalaunch.plan.layers import list_layers
from megalaunch.schema.build import SpecError, build_section
from megalaunch.schema.model import Family, ModelSpec
from megalaunch.schema.rope import RopeSpec

_DENSE = (gpt, llama, mistral, qwen2, qwen3, smollm3, gemma2, gemma3, phi3, olmo2, gpt_neox)
_EXPERTS = (mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, gpt_oss)
FAMILIES: Mapping[str, FamilySpec] = {file.FAMILY.name: file.FAMILY for file in (*_DENSE, *_EXPERTS)}
_BY_TYPE = {family.model_type: family for family in FAMILIES.values()}
_BY_MULTIMODAL_TYPE = {
    family.multimodal_type: family for family in FAMILIES.values() if family.multimodal_type is not None
}
# Fields that do not change the model's output.
_WITHOUT_EFFECT = frozenset(
    {"name", "init_std", "embedding_init_std", "hidden_dropout", "embedding_dropout", "attention_dropout"}
)
# The same of the sections, by section: they act in training only.
_TRAINING_ONLY = {
    "moe": frozenset(
        {
            "balance_loss",
            "balance_loss_coeff",
            "balance_bias_rate",
            "z_loss_coeff",
            "input_jitter",
            "router_dtype",
            "choice",
        }
    ),
    "mtp": frozenset({"loss_coeff"}),
}


class FamilyError(ValueError):
    """A model that cannot be converted; `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def from_hf_config(config: Mapping[str, Any], name: str, notes: list[str] | None = None) -> ModelSpec:
    """Convert a config.json to a resolved model section.

    Args:
        config: the parsed file.
        name: name of the model.
        notes: receives a note for each ignored key, if given.

    Raises:
        FamilyError: lists every reason why there is no such section.
    """
    try:
        return _read(config, name, notes)
    except FamilyError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
        raise FamilyError([f"a value in config.json has the wrong type: {str(error)[:200]}"]) from error


def _read(config: Mapping[str, Any], name: str, notes: list[str] | None) -> ModelSpec:
    """Convert a config.json; FamilyError lists the problems of the decoder and of the outer multimodal config."""
    multimodal = multimodal_family(config)
    text, outer = (config, ConfigFile({})) if multimodal is None else split_config(config, multimodal.model_type)
    kind = text.get("model_type")
    family = _BY_TYPE.get(kind) if isinstance(kind, str) else None
    own_code = names_own_code(config) or names_own_code(text)
    if family is None:
        known = ", ".join((*_BY_TYPE, *_BY_MULTIMODAL_TYPE))
        never_run = f"; the folder names its {own_code}, which is never run" if own_code else ""
        raise FamilyError(
            [f"config.json: model_type {kind!r} is not supported; the supported types are {known}{never_run}"]
        )
    file = ConfigFile({**family.defaults, **_rename_aliases(family, text)})
    values = family.read(file)
    file.reject_unknown_keys()
    if outer.problems or file.problems:
        raise FamilyError([*outer.problems, *file.problems])
    if notes is not None:
        notes += [*outer.notes, *file.notes]
        if own_code:
            notes.append(
                f"config.json: auto_map names the folder's {own_code}, which is never run: the model is built as "
                f"family {family.name}, and computes what that family computes"
            )
    try:
        return build_section(ModelSpec, {"name": name, "family": family.name, **values}, "model.")
    except SpecError as error:
        raise FamilyError([str(error)]) from error


def _rename_aliases(family: FamilySpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with each key under its first name. Raises FamilyError if both names have different values."""
    names = {alias: name for alias, name in family.aliases.items() if alias in config}
    different = [alias for alias, name in names.items() if config.get(name, config[alias]) != config[alias]]
    if different:
        raise FamilyError([f"config.json: {alias} and {names[alias]} differ" for alias in different])
    return {names.get(key, key): value for key, value in config.items()}


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's config.json: the file itself, or the text part of a multimodal config."""
    multimodal = multimodal_family(config)
    return config if multimodal is None else split_config(config, multimodal.model_type)[0]


def multimodal_family(config: Mapping[str, Any]) -> FamilySpec | None:
    """Return the family of a multimodal config's text decoder; None for a language model's config."""
    kind = config.get("model_type")
    return _BY_MULTIMODAL_TYPE.get(kind) if isinstance(kind, str) else None


def to_hf_config(model: ModelSpec) -> dict[str, Any]:
    """Convert a resolved model section to a config.json. Raises FamilyError if its family cannot express the model."""
    family = family_of(model)
    config = {"model_type": family.model_type, "architectures": [family.architecture], **family.write(model)}
    lost = differences(model, from_hf_config(config, model.name))
    if lost:
        raise FamilyError([f"family {model.family} cannot express {difference}" for difference in lost])
    return config


def with_family(model: ModelSpec) -> ModelSpec:
    """Return the model with the first family that can express it, so that it can be exported; unchanged if none can."""
    for name in FAMILIES:
        as_one = replace(model, family=cast(Family, name))
        try:
            to_hf_config(as_one)
        except FamilyError:
            continue
        return as_one
    return model


def family_of(model: ModelSpec) -> FamilySpec:
    """Return a model's family. Raises FamilyError if it is not supported."""
    if model.family not in FAMILIES:
        raise FamilyError(
            [f"family {model.family} cannot be exported; the supported families are {', '.join(FAMILIES)}"]
        )
    return FAMILIES[model.family]


def _comparable(model: ModelSpec) -> dict[str, Any]:
    """Return the fields that change the model's output, with equal values for equal meanings."""
    values = {key: value for key, value in asdict(model).items() if key not in _WITHOUT_EFFECT}
    for section, names in _TRAINING_ONLY.items():
        values[section] = {key: value for key, value in values[section].items() if key not in names}
    values["rope"] |= _fold_mscale(model.rope) | dict.fromkeys(fields_without_effect(model.rope))
    if model.moe.num_experts is not None:
        values["moe"] |= _expand_defaults(model)
        if all(layer.experts for layer in list_layers(model)):
            values["ffn_hidden_size"] = None  # no layer has a dense feed-forward block
    return values


def _fold_mscale(rope: RopeSpec) -> dict[str, Any]:
    """Return mscale folded into the attention factor: config.json has one number for both."""
    if rope.scaling != "yarn" or rope.mscale_all_dim:
        return {}
    return {"attention_factor": attention_factor(rope), "mscale": 1.0}


def _expand_defaults(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of `moe` whose null stands for a value."""
    moe = model.moe
    score = None if moe.num_groups is None else moe.group_score_top_k or moe.top_k // (moe.top_k_groups or 1)
    return {"ffn_hidden_size": moe.ffn_hidden_size or model.ffn_hidden_size, "group_score_top_k": score}


def differences(model: ModelSpec, other: ModelSpec) -> list[str]:
    """List every field whose difference changes the output of two models: `model.qk_norm=head (not none)`."""
    found, others = [], _comparable(other)
    for key, mine in _comparable(model).items():
        its = others[key]
        if isinstance(mine, dict):
            found += [f"model.{key}.{k}={v} (not {its[k]})" for k, v in mine.items() if v != its[k]]
        elif mine != its:
            found.append(f"model.{key}={mine} (not {its})")
    return found
