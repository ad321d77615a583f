"""Declare a field of the run spec: default, one-line meaning, unit and limits in one place.

Command-line help, completion and the reference pages are generated from these declarations.
"""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

LARGEST_INTEGER = 10**9
LARGEST_FLOAT = 1e100
"""Default maximum of a number: small enough that no sum or product of settings overflows."""


def setting(
    default: Any = MISSING,
    meaning: str = "",
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare one dataclass field.

    `meaning` is one sentence for help and docs, `unit` its unit ("tokens", "steps", ...), `minimum` and
    `maximum` the smallest and largest legal number (of each item of a list), checked when the spec is built.
    """
    metadata = {"meaning": meaning, "unit": unit, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=metadata)
