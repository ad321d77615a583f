"""Format recipes as a table, and the differences of two recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.format.numbers import format_short_count
from megalaunch.format.table import table_lines
from megalaunch.plan.resume_compatibility import differences
from megalaunch.schema import RunSpec

_NAMES = ("run.name", "run.directory", "model.name")
"""Keys that hold only names."""


@dataclass(frozen=True)
class RecipeRow:
    """One recipe. A value that depends on data or the machine is None; with a `problem` all values are.

    `parameters` counts the decoder's parameters, `active` those used per token. `layout` is a layout name such as
    "tp4 pp8 sp", "" for data parallelism alone.
    """

    name: str
    summary: str
    model: str | None = None
    parameters: int | None = None
    active: int | None = None
    devices: int | None = None
    chip: str | None = None
    layout: str | None = None
    sequence_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    problem: str = ""


def rows_text(rows: Sequence[RecipeRow]) -> str:
    """Format the rows as a table; unknown values are blank."""
    table = [("recipe", "parameters", "devices", "layout", "sequence", "description")]
    for row in rows:
        devices = f"{row.devices} {row.chip or ''}".strip() if row.devices else (row.chip or "any")
        size = _size(row)
        sequence = "" if row.sequence_length is None else str(row.sequence_length)
        summary = f"does not compose: {row.problem}" if row.problem else row.summary
        table.append((row.name, size, "" if row.problem else devices, row.layout or "", sequence, summary))
    return "\n".join(table_lines(table, indent=0))


def _size(row: RecipeRow) -> str:
    if row.parameters is None:
        return ""
    active = "" if row.active is None else f", {format_short_count(row.active)} active"
    return format_short_count(row.parameters) + active


def spec_differences(left: RunSpec, right: RunSpec) -> list[tuple[str, Any, Any]]:
    """Return (key, left, right) of every differing setting except names, in the order of the schema."""
    return [entry for entry in differences(left, right) if entry[0] not in _NAMES]


def differences_text(names: tuple[str, str], found: Sequence[tuple[str, Any, Any]]) -> str:
    """Format the differences of two recipes as a table."""
    from megalaunch.plan.findings import as_override

    if not found:
        return f"{names[0]} and {names[1]} give the same run"
    rows = [("key", *names), *((key, as_override(left), as_override(right)) for key, left, right in found)]
    return "\n".join(table_lines(rows, indent=0))
