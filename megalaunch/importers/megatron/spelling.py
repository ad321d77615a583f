"""Translate a single setting in Megatron-LM's spelling, typed where an override is expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.format.yaml_value import to_yaml
from megalaunch.importers.megatron.arguments import Arguments, flag_keys, known_flags, parse_arguments, unmapped_reason
from megalaunch.importers.megatron.flag_table import DIRECT, EXPERTS, LATENT
from megalaunch.importers.megatron.model_values import model_values
from megalaunch.importers.megatron.training_values import training_values


@dataclass(frozen=True)
class Translated:
    """The overrides for a flag, or the reason why there are none."""

    overrides: tuple[str, ...]
    reason: str = ""


def translate(flag: str, values: Sequence[str] = ()) -> Translated | None:
    """Translate one Megatron flag (without dashes) to overrides; None if Megatron has no such flag.

    >>> translate("tensor_model_parallel_size", ["4"])
    Translated(overrides=('parallel.tp=4',), reason='')
    """
    name = flag.lower().replace("_", "-")
    unmapped = unmapped_reason(name)
    if name not in known_flags():
        return Translated((), unmapped[1]) if unmapped else None
    arity = known_flags()[name]
    taken = [] if arity == 0 else list(values)[:1] if arity == 1 else list(values)
    given = parse_arguments([f"--{name}", *taken, *_others(name)])
    keys = flag_keys(name)
    found = _values(given, name) if taken or arity == 0 else {}
    if name in given.statuses and given.statuses[name][0] in ("unsupported", "ignored"):
        return Translated((), given.statuses[name][1])
    known = tuple(f"{key}={found[key]}" for key in keys if key in found and not _is_off(arity, values))
    return Translated(known or tuple(f"{key}=VALUE" for key in keys))


def _others(name: str) -> list[str]:
    """Return flags without which Megatron ignores this one, so that it converts as it does in a script."""
    others = {"tensor-model-parallel-size": "2", "group-query-attention": ""}
    others |= {"num-experts": "8"} if name.startswith(("moe-", "expert-")) else {}
    return [part for flag, value in others.items() if flag != name for part in (f"--{flag}", value) if part]


def _values(given: Arguments, name: str) -> dict[str, str]:
    """Return the keys that a flag sets when it is given alone."""
    for flag, key, kind, _ in (*DIRECT, *EXPERTS, *LATENT):
        if flag == name:
            return {key: "true" if kind is bool else str(given.value(flag))}
    return {key: _argument(value) for key, value in {**model_values(given), **training_values(given, None)}.items()}


def _is_off(arity: int, values: Sequence[str]) -> bool:
    """Return True for `swiglu=false`: Megatron's switches have no negated form, so the opposite is undefined."""
    return arity == 0 and bool(values) and values[0].lower() in ("false", "0", "no", "off")


def _argument(value: Any) -> str:
    """Format a value for an override; list items with spaces are quoted."""
    if isinstance(value, list | tuple):
        return f"[{','.join(repr(item) if isinstance(item, str) and ' ' in item else str(item) for item in value)}]"
    return to_yaml(value)
