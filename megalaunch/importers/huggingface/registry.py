"""The registry of families: convert a config.json to a model section, and a model section to a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from megalaunch.importers.huggingface import (
    gemma2,
    gemma3,
    gpt,
    gpt_neox,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from megalaunch.importers.huggingface.family import FamilySpec
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.multimodal import split_config
from megalaunch.plan.attention_factor import attention_factor
from megalaunch.schema.build import SpecError, build_section
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.rope import RopeSpec

_FILES = (gpt, llama, mistral, qwen2, qwen3, smollm3, gemma2, gemma3, phi3, olmo2, gpt_neox)
FAMILIES: Mapping[str, FamilySpec] = {file.FAMILY.name: file.FAMILY for file in _FILES}
_BY_TYPE = {family.model_type: family for family in FAMILIES.values()}
_BY_MULTIMODAL_TYPE = {
    family.multimodal_type: family for family in FAMILIES.values() if family.multimodal_type is not None
}
# Fields that do not change the model's output.
_WITHOUT_EFFECT = frozenset(
    {"name", "init_std", "embedding_init_std", "hidden_dropout", "embedding_dropout", "attention_dropout"}
)


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
    if family is None:
        known = ", ".join((*_BY_TYPE, *_BY_MULTIMODAL_TYPE))
        raise FamilyError([f"config.json: model_type {kind!r} is not supported; the supported types are {known}"])
    file = ConfigFile({**family.defaults, **text})
    values = family.read(file)
    file.reject_unknown_keys()
    if outer.problems or file.problems:
        raise FamilyError([*outer.problems, *file.problems])
    if notes is not None:
        notes += [*outer.notes, *file.notes]
    try:
        return build_section(ModelSpec, {"name": name, "family": family.name, **values}, "model.")
    except SpecError as error:
        raise FamilyError([str(error)]) from error


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


def family_of(model: ModelSpec) -> FamilySpec:
    """Return a model's family. Raises FamilyError if it is not supported."""
    if model.family not in FAMILIES:
        raise FamilyError(
            [f"family {model.family} cannot be exported; the supported families are {', '.join(FAMILIES)}"]
        )
    return FAMILIES[model.family]


def _fold_mscale(rope: RopeSpec) -> dict[str, Any]:
    """Return the section with mscale folded into the attention factor: config.json has one number for both."""
    values = asdict(rope)
    if rope.scaling == "yarn" and not rope.mscale_all_dim:
        values |= {"attention_factor": attention_factor(rope), "mscale": 1.0}
    return values


def differences(model: ModelSpec, other: ModelSpec) -> list[str]:
    """List every field whose difference changes the output of two models: `model.qk_norm=head (not none)`."""
    found = []
    for field in fields(ModelSpec):
        if field.name in _WITHOUT_EFFECT:
            continue
        mine, its = getattr(model, field.name), getattr(other, field.name)
        if field.name in ("rope", "moe", "mla", "mtp"):
            mine, its = asdict(mine), asdict(its)
            if field.name == "rope":
                mine, its = _fold_mscale(model.rope), _fold_mscale(other.rope)
            found += [f"model.{field.name}.{k}={v} (not {its[k]})" for k, v in mine.items() if v != its[k]]
        elif mine != its:
            found.append(f"model.{field.name}={mine} (not {its})")
    return found
