"""Summarize recipes as table rows (model, size, devices, layout, sequence), and compare two recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.config.compose import Composer
from megalaunch.config.errors import ConfigError
from megalaunch.config.recipes import read_summary
from megalaunch.format.numbers import format_short_count
from megalaunch.format.table import table_lines
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.resolve import derive, resolve
from megalaunch.plan.resume_compatibility import differences
from megalaunch.plan.supported import unsupported
from megalaunch.plan.world import world_size
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ParallelSpec

_NAMES = ("run.name", "run.directory", "model.name")
"""Keys that hold only names."""


@dataclass(frozen=True)
class RecipeRow:
    """One recipe. A value that depends on data or the machine is None; with a `problem` all values are.

    `parameters` counts the decoder's parameters, `active` those used per token. `layout` is a layout name such as
    "tp4 pp8 sp", "" for data parallelism alone. `not_trained` lists the features that the engine does not support.
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
    not_trained: tuple[str, ...] = ()
    problem: str = ""


def recipe_rows(files: Mapping[str, Path], machine: Machine) -> list[RecipeRow]:
    """Return the row of each recipe on `machine`; `problem` is set for a recipe that does not compose."""
    composer = Composer()
    return [_row(name, read_summary(path), machine, composer) for name, path in files.items()]


def _row(name: str, summary: str, machine: Machine, composer: Composer) -> RecipeRow:
    try:
        composition = composer.compose([f"recipe={name}"])
    except ConfigError as error:
        return RecipeRow(name, summary, problem=error.problems[0].message)
    written, spec = composition.spec, resolve(composition.spec, machine, name).spec
    fewest = None if written.platform.chip == "auto" else world_size(derive(written)[0].cluster)
    count = count_parameters(spec.model) if spec.model.vocab_size is not None else None
    return RecipeRow(
        name,
        summary,
        model=spec.model.name,
        parameters=count.decoder if count else None,
        active=count.active if count and spec.model.moe.num_experts is not None else None,
        devices=fewest,  # None: the recipe runs on the devices of any machine
        chip=None if written.platform.chip == "auto" else written.platform.chip,
        layout=" ".join(layout_text(written.parallel)),
        sequence_length=spec.batch.sequence_length,
        micro_batch_size=written.batch.micro_batch_size,
        global_batch_size=spec.batch.global_batch_size,
        not_trained=tuple(dict.fromkeys(limit.meaning for limit, _ in unsupported(spec))),
    )


def layout_text(parallel: ParallelSpec) -> Iterator[str]:
    """Yield the parts of a layout besides data parallelism: `tp4`, `pp8`, `sp`, ..."""
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        degree = getattr(parallel, axis)
        if degree is not None and degree > 1:
            yield f"{axis}{degree}"
    if parallel.sequence_parallel:
        yield "sp"
    if parallel.data_sharding == "optim_grads_params":
        yield "zero3"
    if (
        parallel.pipeline_layout
        or parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
        or _uneven(parallel)
    ):
        yield "uneven stages"


def _uneven(parallel: ParallelSpec) -> bool:
    return (
        parallel.num_layers_in_first_pipeline_stage is not None
        or parallel.num_layers_in_last_pipeline_stage is not None
    )


def rows_text(rows: Sequence[RecipeRow]) -> str:
    """Format the rows as a table; unknown values are blank."""
    table = [("recipe", "parameters", "devices", "layout", "sequence", "description")]
    for row in rows:
        devices = f"{row.devices} {row.chip or ''}".strip() if row.devices else (row.chip or "any")
        size = _size(row)
        sequence = "" if row.sequence_length is None else str(row.sequence_length)
        summary = f"does not compose: {row.problem}" if row.problem else row.summary + _mark(row)
        table.append((row.name, size, "" if row.problem else devices, row.layout or "", sequence, summary))
    return "\n".join(table_lines(table, indent=0))


def _mark(row: RecipeRow) -> str:
    return f" [plans only: {', '.join(row.not_trained)}]" if row.not_trained else ""


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
