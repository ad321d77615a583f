"""`megalaunch plan --deep`: memory and communication of one rank's simulated step, next to the planner's figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from megalaunch.format.numbers import format_bytes
from megalaunch.format.table import table_lines
from megalaunch.installation import install_command

if TYPE_CHECKING:
    from megalaunch.engine.api import DeepPlan
    from megalaunch.plan.check import HasOrigin
    from megalaunch.plan.memory import Memory
    from megalaunch.schema import RunSpec


def show_deep(spec: RunSpec, origins: Mapping[str, HasOrigin], rank: int | None, as_json: bool) -> None:
    """Simulate one step on fake tensors and print it; exit with code 2 if the engine does not support the run."""
    from megalaunch.runs.errors import fail

    if find_spec("torch") is None:
        fail(f"plan --deep needs torch, which is not installed; add it with: {install_command('megalaunch[train]')}")
    _require_valid(spec, origins)
    from megalaunch.plan.memory.rank import memory_by_rank
    from megalaunch.plan.topology import Topology

    topology = Topology.from_spec(spec)
    if rank is not None and rank >= topology.world:
        fail(f"--rank {rank} is outside the world of {topology.world}\nfix:  --rank 0 to {topology.world - 1}")
    from megalaunch.engine import api

    found = api.deep_plan(spec, rank)
    planned = memory_by_rank(spec)[topology.dense_grid.coordinates(found.rank)["pp"]]
    typer.echo(_as_json(spec, found, planned) if as_json else _as_text(spec, found, planned))


def _require_valid(spec: RunSpec, origins: Mapping[str, HasOrigin]) -> None:
    """Exit if the run is not valid, or computed by Transformer Engine; it may exceed device memory."""
    from megalaunch.plan.attention_backends import has_library_ring
    from megalaunch.plan.check import check
    from megalaunch.plan.report import finding_block
    from megalaunch.runs.errors import fail, refuse

    errors = [f for f in check(spec, origins) if f.severity == "error" and f.rule != "memory.fits"]
    if errors:
        refuse("\n\n".join(finding_block(finding) for finding in errors))
    if spec.model.vocab_size is None:
        fail("the vocabulary is open; give it (model.vocab_size=N) or the data")
    if spec.precision.uses_transformer_engine:
        fail(
            "a deep plan simulates the engine's own matmuls, not Transformer Engine's\n"
            "fix:  precision.fp8.implementation=native"
        )
    if has_library_ring(spec):
        fail(
            "a deep plan simulates the engine's own ring of context parallelism, not Transformer Engine's\n"
            "fix:  model.attention_backend=auto"
        )


def _as_text(spec: RunSpec, found: DeepPlan, planned: Memory) -> str:
    from megalaunch.plan.report import run_table
    from megalaunch.plan.topology import Topology

    return "\n\n".join(
        [
            run_table(spec, Topology.from_spec(spec)),
            "\n".join(_memory_lines(found, planned)),
            "\n".join(_communication_lines(found)),
        ]
    )


def _memory_lines(found: DeepPlan, planned: Memory) -> Iterator[str]:
    devices = "GPU operators" if found.on_gpu else "CPU operators"
    yield (
        f"rank {found.rank} of {found.world} ({found.coordinates}): {found.parameters:,} parameters, "
        f"peak in the {found.phase} pass, {devices}"
    )
    rows = [("", "engine", "planner", "")]
    for kind, size in found.kinds.items():
        other = planned.kinds.get(kind)
        rows.append((kind, format_bytes(size, digits=2), "" if other is None else format_bytes(other, digits=2), ""))
    difference = f"{planned.total / found.total - 1:+.1%}"
    rows.append(("total", format_bytes(found.total, digits=2), format_bytes(planned.total, digits=2), difference))
    yield from table_lines(rows, right=(1, 2))


def _communication_lines(found: DeepPlan) -> Iterator[str]:
    part = "" if found.computed == found.microbatches else f", {found.computed} of them simulated"
    yield f"collectives of a step of {found.microbatches} microbatches{part}"
    rows = [("phase", "kind", "axis", "ranks", "calls", "bytes")]
    for one in found.collectives:
        size = format_bytes(one.bytes, digits=2)
        rows.append((one.phase, one.kind, one.axis, f"{one.ranks}", f"{one.count:,}", size))
    yield from table_lines(rows if found.collectives else [("none: there is one rank",)], right=(3, 4, 5))


def _as_json(spec: RunSpec, found: DeepPlan, planned: Memory) -> str:
    from megalaunch.platform.chips import CHIPS

    data: dict[str, Any] = {
        "rank": found.rank,
        "world": found.world,
        "coordinates": found.coordinates,
        "parameters": found.parameters,
        "microbatches": found.microbatches,
        "computed_microbatches": found.computed,
        "operators": "gpu" if found.on_gpu else "cpu",
        "memory": {
            "bytes": found.kinds,
            "total": found.total,
            "phase": found.phase,
            "planned": planned.kinds,
            "planned_total": planned.total,
            "device_bytes": CHIPS[spec.platform.chip].memory_bytes,
        },
        "collectives": [vars(one) for one in found.collectives],
        "seconds": found.seconds,
    }
    return json.dumps(data, indent=2)
