"""Suggest a replacement for a key, an option or a recipe that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from megalaunch.config.keys import SECTIONS, schema_keys, suggestion
from megalaunch.config.other_programs import describe_equivalent_key
from megalaunch.config.parallel_names import GRAMMAR, merge_layout_names
from megalaunch.schema.build import did_you_mean
from megalaunch.schema.remote import is_address, is_hub_address, is_hub_name

_MANY = 20  # names, more than four lines of a message


def unknown_key(key: str, value: str = "") -> str:
    """Describe an unknown key and suggest the nearest one; other programs' names are translated."""
    name = key.rpartition(".")[2]
    overrides, reason = _from_megatron(name, value)
    if overrides:
        keys = " and ".join(map(repr, _keys(overrides)))
        fix = f": write {' '.join(overrides)}" if value else ""
        return f"unknown key; did you mean {keys}? It is {name} of Megatron-LM{fix}"
    if advice := describe_equivalent_key(key):
        return f"unknown key; {advice}"
    if reason and not any(path.endswith(f".{name}") for path in schema_keys()):
        return f"unknown key; it is a Megatron-LM argument; remove it: {reason}"
    section = key.partition(".")[0]
    listed = f"`megalaunch explain {section if section in SECTIONS else 'train'}` lists the keys of a section"
    return f"unknown key{suggestion(key) or f'; {listed}'}"


def _from_megatron(name: str, value: str) -> tuple[Sequence[str], str]:
    """Return the overrides for a setting in Megatron-LM's spelling, or the reason why it has none."""
    from megalaunch.importers.megatron.spelling import translate

    answer = translate(name, [value] if value else []) if "_" in name or "-" in name else None
    if answer is None or any(part.endswith(f".{name}") for part in _keys(answer.overrides)):
        return (), ""
    return answer.overrides, answer.reason


def _keys(overrides: Sequence[str]) -> list[str]:
    return [override.partition("=")[0] for override in overrides]


def unknown_option(group: str, name: str, names: Sequence[str]) -> str:
    """Describe an unknown option of a config group, with a hint that suits the group."""
    text = f"there is no {group}={name}"
    if group == "parallel":
        joined = merge_layout_names(name)
        near = f"; did you mean parallel={joined}?" if joined else f"{did_you_mean(name, list(names))};"
        return f"{text}{near} a layout name is {GRAMMAR}, e.g. parallel=tp4pp4"
    if group == "data" and (hint := _own_text(name)):
        return f"{text}; {hint}"
    if group == "model":
        same = _same_model(name, names)
        if same and is_hub_name(name):
            return f"{text}; model={same} has its architecture, or {_of_hub(name)}"
        if is_hub_address(name):
            return f"{text}: a recipe cannot name a model of the Hub; give it on the command line: model={name}"
        if _exists(name):
            return f"{text}: a recipe cannot name a folder; give it on the command line: model={name}"
        if is_hub_name(name):
            return f"{text}; if it is a name on the Hugging Face Hub, {_of_hub(name)}"
        if name.startswith(("/", "./", "../", "~")):
            return f"{text}: the folder does not exist; name a Hugging Face folder with a config.json"
        near = f"; did you mean {same!r}?" if same else ""
        return f"{text}{near} (nor a folder of that name with a config.json; {_listed(group, names)})"
    longer = [repr(known) for known in names if known.startswith(name)] if name else []
    near = f"; did you mean {' or '.join(longer)}?" if longer else did_you_mean(name, list(names))
    return f"{text}{near} ({_listed(group, names)})"


def _listed(group: str, names: Sequence[str]) -> str:
    """Return the options, or where they are listed if they are many."""
    if len(names) > _MANY:
        return f"`megalaunch explain {group}` lists all {len(names)} options"
    return f"available: {', '.join(names)}"


def unknown_recipe(name: str, names: Sequence[str]) -> str:
    """Describe an unknown recipe and suggest the nearest one."""
    near = did_you_mean(name, list(names))
    if _exists(f"{name}.yaml"):
        near = f"; did you mean 'recipe={name}.yaml'?"
    elif not near and is_hub_name(name):
        near = "; a model hub name is not a recipe"
    return f"there is no recipe {name!r}{near} (available: {', '.join(names)}; or a path to a .yaml)"


def _of_hub(name: str) -> str:
    return f"write model=hf://{name} for its architecture and checkpoint.load_pretrained=hf://{name} for its weights"


def _own_text(name: str) -> str:
    """Return how to name the user's own text, if `data=NAME` can only mean that; else ""."""
    if is_hub_address(name):
        return f"for data of the Hugging Face Hub set data.corpus={name}"
    if is_address(name):
        return "data is not downloaded: download it first, then set data.corpus=PATH to the file or folder"
    if _exists(f"{name}.idx"):
        return f"for tokenized data set data.train_prefix={name}"
    if _exists(name):
        return f"for text of your own set data.corpus={name}"
    if is_hub_name(name):
        return f"if {name} is a dataset of the Hugging Face Hub, set data.corpus=hf://datasets/{name}"
    return f"for text of your own set data.corpus={name}" if re.search(r"[/.*~]", name) else ""


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such home
        return False


def _same_model(name: str, names: Sequence[str]) -> str | None:
    """Return the option with which the name begins, letters and digits compared.

    `meta-llama/Llama-3.1-8B-Instruct` gives llama31_8b.
    """
    wanted = _letters(name.rpartition("/")[2]).removeprefix("meta")
    begins = [option for option in names if wanted.startswith(_letters(option))]
    if begins:
        return max(begins, key=len)
    near = difflib.get_close_matches(wanted, [_letters(option) for option in names], n=1)
    return next((option for option in names if near and _letters(option) == near[0]), None)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
