"""`megalaunch plan --search`: the fastest layouts of a run, dropped ones by rule, and the rank of its own layout."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from megalaunch.format.table import table_lines

if TYPE_CHECKING:
    from megalaunch.plan.search import Difference, Found, SearchResult
    from megalaunch.schema import RunSpec

SHOWN = 10
_GIB = 2**30
_REASONS = 3


def show_search(spec: RunSpec, devices: int | None, as_json: bool, shown: int = SHOWN) -> None:
    """Search the layouts of a resolved spec and print the best; exit code 2 when none can run."""
    from megalaunch.cli.output.progress import percent_progress
    from megalaunch.plan.search import SearchError, search
    from megalaunch.runs.errors import fail

    try:
        result = search(spec, devices, percent_progress("searching layouts"))
    except SearchError as error:
        fail(str(error))
    best = result.ranked[:shown]
    typer.echo(search_json(result, best) if as_json else search_text(result, best))
    if not best:
        raise typer.Exit(2)


def layout_text(spec: RunSpec) -> list[str]:
    """Return the overrides of a layout: `parallel=NAME`, what the name does not cover, and the nodes."""
    from dataclasses import fields

    from megalaunch.config.keys import schema_defaults
    from megalaunch.config.parallel_names import layout_name
    from megalaunch.plan.findings import as_override

    defaults = schema_defaults()
    named: dict[str, Any] = {}
    overrides: list[str] = []
    for entry in fields(spec.parallel):
        value = getattr(spec.parallel, entry.name)
        derived = entry.name == "dp" or (entry.name == "schedule" and value in ("1f1b", "interleaved"))
        if derived or value == defaults["parallel"][entry.name]:
            continue
        if layout_name({entry.name: value}):
            named[entry.name] = value
        else:
            overrides.append(f"parallel.{entry.name}={as_override(value)}")
    overrides = [f"parallel={layout_name(named) or 'dp'}", *overrides]
    overrides.append(f"batch.micro_batch_size={as_override(spec.batch.micro_batch_size)}")
    recompute = spec.recompute
    overrides.append(f"recompute={recompute.granularity}")
    if recompute.granularity == "selective":
        overrides.append(f"recompute.modules={as_override(recompute.modules)}")
    if recompute.granularity == "full":
        overrides += [f"recompute.method={recompute.method}", f"recompute.num_layers={recompute.num_layers}"]
    if recompute.cpu_offloading_num_layers:
        overrides.append(f"recompute.cpu_offloading_num_layers={recompute.cpu_offloading_num_layers}")
    cluster = spec.cluster
    return [*overrides, f"cluster.nodes={cluster.nodes}", f"cluster.devices_per_node={cluster.devices_per_node}"]


def search_text(result: SearchResult, best: Sequence[Found]) -> str:
    """Return a table of the best, the overrides of the first, dropped counts, and gains over the run's layout."""
    lines = _table(result, best)
    if best:
        lines += ["", f"the fastest:   {shlex.join(layout_text(best[0].spec))}"]
        with_headroom = next((found for found in best if not _near_memory_limit(result, found)), None)
        if with_headroom is not None and with_headroom is not best[0]:
            lines.append(f"with headroom: {shlex.join(layout_text(with_headroom.spec))}")
    own = _own_lines(result, best)
    return "\n".join([*lines, *own, "", *_counts(result)])


def _table(result: SearchResult, best: Sequence[Found]) -> list[str]:
    rows = [("", "tokens/s/device", "MFU", "GiB free", "layout")]
    own_too = [result.own] if result.own is not None and all(f.spec != result.own.spec for f in best) else []
    for found in [*best, *own_too]:
        free = (result.device_bytes - found.memory.total) / _GIB
        marks = ["tight"] if _near_memory_limit(result, found) else []
        marks += ["this run's"] if result.own is not None and found.spec == result.own.spec else []
        own = f" ({', '.join(marks)})" if marks else ""
        shown = (f"{result.place(found)}", f"{found.speed:,.1f}", f"{found.time.mfu_causal:.1%}", f"{free:.1f}")
        rows.append((*shown, _short_layout(found.spec) + own))
    return table_lines(rows, right=(0, 1, 2, 3), indent=0)


def _near_memory_limit(result: SearchResult, found: Found) -> bool:
    """Return whether libraries and fragmentation may exceed the remaining memory; the checker warns of it too."""
    from megalaunch.plan.memory.fit import TIGHT

    return found.memory.total > TIGHT * result.device_bytes


def _short_layout(spec: RunSpec) -> str:
    """A layout for a table: `tp8pp8cp2vpp8 dp8 hsdp2 zero1 micro 1 embedding and head as layers`."""
    p, recompute = spec.parallel, spec.recompute
    axes = "".join(f"{axis}{getattr(p, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(p, axis) > 1)
    axes += f"etp{p.etp}" if p.etp and p.etp > 1 else ""
    axes += f"vpp{p.vpp}" if p.vpp else ""
    sharding = {"no_shard": "zero0", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
    hsdp = f"hsdp{p.dp_replicate}" if p.dp_replicate > 1 else ""
    parts = [axes, f"dp{p.dp}", hsdp, sharding[p.data_sharding], f"micro {spec.batch.micro_batch_size}"]
    if p.pipeline_layout is not None:
        parts.append(f"layout of {p.pipeline_layout.count('|') + 1} stages")
    if p.num_layers_in_first_pipeline_stage is not None or p.num_layers_in_last_pipeline_stage is not None:
        parts.append(
            f"ends of {p.num_layers_in_first_pipeline_stage or 'an even share'} "
            f"and {p.num_layers_in_last_pipeline_stage} layers"
        )
    if p.account_for_embedding_in_pipeline_split or p.account_for_loss_in_pipeline_split:
        parts.append("embedding and head as layers" if p.account_for_embedding_in_pipeline_split else "head as a layer")
    if recompute.granularity != "none":
        modules = f" of {', '.join(recompute.modules)}" if recompute.granularity == "selective" else ""
        parts.append(f"recompute {recompute.granularity}{modules}")
    return " ".join(part for part in parts if part)


def _own_lines(result: SearchResult, best: Sequence[Found]) -> list[str]:
    from megalaunch.plan.search import differences

    own = result.own
    if own is None:
        return ["", f"this run's layout is not among them: {result.own_fault}"]
    place = result.place(own)
    share = place / result.valid
    head = f"this run's layout is number {place} of {result.valid:,} ({share:.1%}): {own.speed:,.1f} tokens/s/device"
    lines = ["", head]
    for found in [f for f in best if f.speed > own.speed][:_REASONS]:
        gain = found.speed / own.speed - 1
        lines.append(
            f"  number {result.place(found)} is {gain:.1%} faster: {_reasons(differences(found.time, own.time))}"
        )
    return lines + ["  (seconds per step of the slowest rank)"] * (len(lines) > 2)


def _reasons(found: Sequence[Difference]) -> str:
    """Return the parts in which the faster layout takes less time, then those in which it takes more."""
    seen = [difference for difference in found if abs(difference.seconds) >= 0.005]
    gains = [d.meaning for d in seen if d.seconds < 0][:_REASONS]
    price = [d.meaning for d in seen if d.seconds > 0][: _REASONS - 1]
    text = "; ".join(gains) or "small differences in every part"
    return f"{text}; but {'; '.join(price)}" if price else text


def _counts(result: SearchResult) -> list[str]:
    head = f"{result.num_considered:,} layouts considered: {result.valid:,} are valid and fit"
    lines = [f"{head}, {result.leaner:,} of them not timed: they recompute more than needed to fit"]
    lines += [f"  {count:>8,}  dropped: {rule}" for rule, count in result.dropped.most_common()]
    return lines


def search_json(result: SearchResult, best: Sequence[Found]) -> str:
    """Return one object: the best layouts with their overrides, the run's layout, dropped counts by rule."""
    data = {
        "devices": best[0].time.world if best else None,
        "considered": result.num_considered,
        "valid": result.valid,
        "not_timed": result.leaner,
        "dropped": dict(result.dropped.most_common()),
        "device_bytes": result.device_bytes,
        "layouts": [_as_json(result, found) for found in best],
        "own": _as_json(result, result.own) if result.own else None,
        "own_fault": result.own_fault,
    }
    return json.dumps(data, indent=2)


def _as_json(result: SearchResult, found: Found) -> dict[str, Any]:
    return {
        "place": result.place(found),
        "overrides": layout_text(found.spec),
        "tokens_per_second_per_device": found.speed,
        "mfu_causal": found.time.mfu_causal,
        "step_seconds": found.time.total,
        "bytes": found.memory.total,
        "bytes_by_kind": found.memory.kinds,
        "headroom_bytes": result.device_bytes - found.memory.total,
        "tight": _near_memory_limit(result, found),
    }
