"""Write imported values as a recipe: existing options by name where they match, new option files elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megalaunch.config.groups import CONF, ConfigValues, load_option, option_names
from megalaunch.config.keys import schema_defaults, schema_keys
from megalaunch.config.parallel_names import layout_name
from megalaunch.config.recipes import HEADER
from megalaunch.format.yaml_value import to_yaml
from megalaunch.schema.paths import entry_at

_SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim",
    "moe.num_experts", "moe.ffn_hidden_size", "mla.kv_lora_rank",
)  # fmt: skip
_MAX_CHANGED = 8  # maximum number of differing keys for a match; with more it is another model of the same size
_NAMED_AXES = ("tp", "pp", "cp", "ep", "etp", "vpp", "dp_replicate", "data_sharding", "sequence_parallel")


@dataclass(frozen=True)
class RecipeFiles:
    """The text of a recipe, and of each option file that it needs, by path relative to the recipe's folder."""

    name: str
    text: str
    option_files: Mapping[str, str]
    picked: Mapping[str, str]


def write_recipe(name: str, values: Mapping[str, Any], platform: str | None, source: str) -> RecipeFiles:
    """Make a recipe that composes to `values`; other keys keep megalaunch's defaults.

    Args:
        name: name of the recipe and its option files.
        values: run spec keys and values.
        platform: the platform option; None picks none.
        source: name of the imported file, for a comment.
    """
    picked: dict[str, str] = {}
    files: dict[str, str] = {}
    model = _nearest_model(values)
    if model:
        picked["model"] = model
    picked["parallel"] = _layout(name, values, files)
    picked["precision"] = _option_or_file("precision", name, values, files)
    if platform:
        picked["platform"] = platform
    named = {"schedule": values.get("schedule.shape"), "optimizer": values.get("optimizer.name")}
    for group, option in (*named.items(), ("recompute", _recompute(values))):
        if option in option_names(group):
            picked[group] = str(option)
    base = _base(picked)
    body = {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] not in ("parallel", "precision", "platform")
        and not _same(key, value, base[key], values)
    }
    if not model:
        body = {"model.name": name, "model.family": infer_family(values), **body}
    lines = [HEADER, f"# Imported from {source}.", "defaults:"]
    lines += [f"  - override /{group}: {option}" for group, option in picked.items()]
    text = "\n".join([*lines, "  - _self_", *_yaml(body)]) + "\n"
    return RecipeFiles(name, text, files, picked)


def infer_family(values: Mapping[str, Any]) -> str:
    """Return the family whose architecture and tensor names fit the values best."""
    experts = values.get("model.moe.num_experts")
    if values.get("model.mla.kv_lora_rank"):
        return "deepseek_v3" if values.get("model.moe.score") == "sigmoid" else "deepseek_v2"
    if values.get("model.attention_sinks"):
        return "gpt_oss"
    if values.get("model.norm") == "layernorm":
        return "gpt"
    if values.get("model.qk_norm") == "head":
        return "qwen3_moe" if experts else "qwen3"
    if experts:
        return "qwen2_moe" if values.get("model.moe.shared_expert_gate") else "mixtral"
    if values.get("model.qkv_bias"):
        return "qwen2"
    return "mistral" if values.get("model.sliding_window") else "llama"


def _nearest_model(values: Mapping[str, Any]) -> str | None:
    """Return the model of conf/ with the same shape; among several, the one with the fewest changed keys."""
    best: tuple[int, str] | None = None
    for option in option_names("model"):
        known = _group_values("model", option)
        same = all(_same(f"model.{key}", values.get(f"model.{key}"), known[f"model.{key}"], values) for key in _SHAPE)
        vocabulary = values.get("model.vocab_size")
        if not same or (vocabulary is not None and known["model.vocab_size"] not in (None, vocabulary)):
            continue
        changed = sum(not _same(key, value, known[key], values) for key, value in values.items() if key in known)
        if changed <= _MAX_CHANGED and (best is None or (changed, option) < best):
            best = changed, option
    return best[1] if best else None


def _same(key: str, ours: Any, other: Any, values: Mapping[str, Any]) -> bool:
    """Return True if two values are equal after null is replaced by its derived value, as the planner does."""
    width, heads = values.get("model.hidden_size"), values.get("model.num_attention_heads")
    derived = {
        "model.num_query_groups": heads,
        "model.head_dim": width // heads if width and heads else None,
        "model.moe.ffn_hidden_size": values.get("model.ffn_hidden_size"),
    }
    left, right = (derived.get(key) if value is None else value for value in (ours, other))
    if key in ("model.num_query_groups", "model.head_dim") and values.get("model.mla.kv_lora_rank"):
        return True
    return bool(_plain(left) == _plain(right))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@cache
def _group_values(group: str, option: str) -> Mapping[str, Any]:
    """Return all keys of a section: an option's values over the schema's defaults."""
    found = load_option(group, option, "", []) or ConfigValues()
    return _defaults(group) | dict(found.values)


@cache
def _defaults(group: str) -> dict[str, Any]:
    nested = schema_defaults()
    return {key: entry_at(nested, key) for key in schema_keys() if key.startswith(f"{group}.")}


def _base(picked: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all keys that the chosen options and the default options set."""
    from megalaunch.schema.yaml_file import load_yaml

    entries = load_yaml(CONF / "config.yaml").data["defaults"]
    options = {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}
    values: dict[str, Any] = {}
    for group in {key.partition(".")[0] for key in schema_keys()}:
        option = picked.get(group, options.get(group))
        known = option in option_names(group) if option else False
        values |= _group_values(group, str(option)) if known else _defaults(group)
    return values


def _layout(name: str, values: Mapping[str, Any], files: dict[str, str]) -> str:
    """Return the parallel option: a generated layout name, or the name of a new option file."""
    defaults = _defaults("parallel")
    changed = {
        key.removeprefix("parallel."): value
        for key, value in values.items()
        if key.startswith("parallel.") and _plain(value) != _plain(defaults[key])
    }
    axes = {axis: changed[axis] for axis in _NAMED_AXES if axis in changed}
    if len(axes) == len(changed):
        return (layout_name(axes) if axes else None) or "dp"
    files[f"conf/parallel/{name}.yaml"] = "\n".join(_yaml(changed)) + "\n"
    return name


def _option_or_file(group: str, name: str, values: Mapping[str, Any], files: dict[str, str]) -> str:
    """Return the option of a group that sets exactly these values, or the name of a new option file."""
    wanted = {key: value for key, value in values.items() if key.startswith(f"{group}.")}
    full = _defaults(group) | wanted
    for option in option_names(group):
        if all(_plain(_group_values(group, option)[key]) == _plain(value) for key, value in full.items()):
            return option
    changed = {key.removeprefix(f"{group}."): value for key, value in full.items() if value != _defaults(group)[key]}
    files[f"conf/{group}/{name}.yaml"] = "\n".join(_yaml(changed)) + "\n"
    return name


def _recompute(values: Mapping[str, Any]) -> str | None:
    """Return the option that sets all recompute keys; None if the recipe's body must set them."""
    wanted = _defaults("recompute") | {key: value for key, value in values.items() if key.startswith("recompute.")}
    for option in option_names("recompute"):
        if all(_plain(_group_values("recompute", option)[key]) == _plain(value) for key, value in wanted.items()):
            return option
    return None


def _yaml(values: Mapping[str, Any]) -> list[str]:
    """Format dotted keys as nested YAML lines, in the schema's order."""
    order = {key: index for index, key in enumerate(schema_keys())}
    lines: list[str] = []
    open_path: list[str] = []
    for key in sorted(values, key=lambda key: order.get(key, -1)):
        *path, last = key.split(".")
        shared = 0
        while shared < min(len(path), len(open_path)) and path[shared] == open_path[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{path[depth]}:" for depth in range(shared, len(path))]
        open_path = path
        lines.append(f"{'  ' * len(path)}{last}: {_scalar(values[key])}")
    return lines


def _scalar(value: Any) -> str:
    """Format a value as YAML; a string is quoted if YAML would parse it as another type."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, str):
        import json

        plain = (
            value.replace("_", "").replace("/", "").isalnum()
            and not value[0].isdigit()
            and value.lower() not in _QUOTED
        )
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return to_yaml(value)


_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # in any case
