"""The schema as a table of dotted keys: its leaves, defaults, and the nearest key to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, get_origin

from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import put

GROUPS = ("model", "parallel", "precision", "platform", "recompute", "optimizer", "schedule", "data", "launcher")
"""Sections that have option files: `model=llama3_8b`."""

SECTIONS = tuple(entry.name for entry in fields(RunSpec))

MISSING_VALUE = "???"
"""The placeholder for a key without a default, until a file or an override sets it."""


@dataclass(frozen=True)
class Key:
    """One leaf of the run spec."""

    path: str
    annotation: Any
    field: Field[Any]

    @property
    def is_text(self) -> bool:
        """True for keys of free text (or null): their overrides are taken as typed."""
        options = getattr(self.annotation, "__args__", (self.annotation,))
        return str in options and all(option in (str, type(None)) for option in options)

    @property
    def takes_list(self) -> bool:
        """True when a list of values is legal."""
        options = (self.annotation, *getattr(self.annotation, "__args__", ()))
        return any(get_origin(option) is tuple for option in options)

    @property
    def takes_null(self) -> bool:
        """True when null is a legal value."""
        return type(None) in getattr(self.annotation, "__args__", ())


@cache
def schema_keys() -> Mapping[str, Key]:
    """Return every leaf of the run spec by dotted path, in schema order."""
    return MappingProxyType({path: Key(path, annotation, entry) for path, annotation, entry in leaves(RunSpec)})


def schema_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults as nested plain data; `???` where a key has none."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, key in schema_keys().items():
        put(values, path, MISSING_VALUE if key.field.default is MISSING else key.field.default)
    return values


def is_section(path: str) -> bool:
    """Return True for `model` and `model.moe`: prefixes of keys."""
    return any(key.startswith(f"{path}.") for key in schema_keys())


def nearest_key(name: str) -> str | None:
    """Return the key or config group that is nearest to a misspelt one, or None."""
    section, _, last = name.rpartition(".")
    named = [path for path in schema_keys() if not section and path.endswith(f".{name}")]
    if named:
        return min(named, key=lambda path: path.count("."))
    candidates = [*schema_keys(), *GROUPS, "recipe"] if section else [*GROUPS, "recipe", *SECTIONS]
    best, best_score = None, 0.6
    for candidate in candidates:
        score = difflib.SequenceMatcher(None, name, candidate).ratio()
        candidate_section, _, candidate_name = candidate.rpartition(".")
        if section and candidate_section:
            by_name = difflib.SequenceMatcher(None, last, candidate_name).ratio()
            begins = 0.8 if len(last) > 2 and candidate_name.startswith(last) else 0.0
            score = max(0.9 * score, (0.95 if section == candidate_section else 0.9) * max(by_name, begins))
        if score > best_score:
            best, best_score = candidate, score
    return _key_named_like(name) if best is None and not section else best


def _key_named_like(name: str) -> str | None:
    """Return the key whose last part is nearest to a name without a section: `stepz` for train.steps."""

    def likeness(path: str) -> float:
        last = path.rpartition(".")[2]
        begins = 0.7 if len(name) > 2 and last.startswith(name) else 0.0
        return max(begins, difflib.SequenceMatcher(None, name, last).ratio())

    best = max(schema_keys(), key=likeness)
    return best if likeness(best) >= 0.7 else None


def suggestion(name: str) -> str:
    """Return `; did you mean 'x'?` for the nearest key, or ""."""
    near = nearest_key(name)
    return f"; did you mean {near!r}?" if near else ""
