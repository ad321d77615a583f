"""Named validation sets (`data.validation_sets`): each a token file, or a blend of several."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalaunch.data.errors import DataError
from megalaunch.data.samples.blended_dataset import WeightedPrefix, blend_entries, parse_blend

KEY = "data.validation_sets"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def parse_validation_sets(entries: Sequence[str]) -> dict[str, tuple[WeightedPrefix, ...]]:
    """Parse entries `NAME PREFIX` and `NAME WEIGHT PREFIX`; entries of one name are a blend.

    Raises:
        DataError: an entry has no name or no prefix, or the weights of a blend are not valid.
    """
    found: dict[str, list[str]] = {}
    for entry in entries:
        name, _, rest = entry.strip().partition(" ")
        if not rest.strip() or _NAME.fullmatch(name) is None:
            raise DataError(f"{KEY} entry `{entry}` is not `NAME PREFIX` or `NAME WEIGHT PREFIX`", fix="Correct it.")
        found.setdefault(name, []).append(rest.strip())
    return {name: parse_blend(parts, f"{KEY} {name}") for name, parts in found.items()}


def validation_set_entries(sets: dict[str, tuple[WeightedPrefix, ...]]) -> tuple[str, ...]:
    """Return entries that `parse_validation_sets` parses into these sets."""
    return tuple(f"{name} {entry}" for name, parts in sets.items() for entry in blend_entries(parts))
