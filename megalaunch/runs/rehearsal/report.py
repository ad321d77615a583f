"""The text of a rehearsal: what was shrunk, and the rehearsal's figures beside those predicted for the run."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.format.numbers import format_duration, format_memory, format_short_count
from megalaunch.format.table import table_lines
from megalaunch.plan.findings import as_override
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.prediction import predict
from megalaunch.plan.world import resolved_world_size
from megalaunch.runs.rehearsal.phases import describe_layout
from megalaunch.runs.rehearsal.shrink import Change, Shrunk
from megalaunch.runs.rehearsal.small_data import data_changes
from megalaunch.schema import RunSpec

_AXES = ("parallel.pp", "parallel.tp", "parallel.cp", "parallel.dp", "parallel.ep", "parallel.etp")


def difference_lines(shrunk: Shrunk) -> list[str]:
    """Return a table of every key that differs from the run's: its value there, and in the rehearsal."""
    rows = [("key", "run", "rehearsal")]
    changes = (*shrunk.changes, *data_changes(shrunk.spec))
    rows += [(change.path, as_override(change.before), as_override(change.after)) for change in changes]
    return table_lines(rows, max_width=48)


def reduced_lines(changes: tuple[Change, ...]) -> list[str]:
    """Return a line about the ranks that are not played; nothing if all are."""
    fewer = [f"{change.path[9:]} {change.before} -> {change.after}" for change in changes if change.path in _AXES]
    if not fewer:
        return []
    return [f"fewer equal ranks: {', '.join(fewer)}; `megalaunch plan --deep` simulates any rank of the whole layout"]


def comparison_lines(run: RunSpec, rehearsal: RunSpec, step_seconds: float, memory: float) -> list[str]:
    """Return a table of the rehearsal beside the run.

    Args:
        run: the resolved spec of the run.
        rehearsal: the spec that was played.
        step_seconds: measured time of a step of the rehearsal.
        memory: measured peak memory of a worker of the rehearsal, bytes.
    """
    rows = [("", "rehearsal, measured", "run, predicted"), *_sizes(rehearsal, run)]
    try:
        predicted = predict(run)
    except ValueError as error:
        rows.append(("memory, speed", f"{format_memory(memory)}, {step_seconds:.2f} s a step", f"unknown: {error}"))
        return table_lines(rows)
    capacity = f" of {format_memory(predicted.device_bytes)}" if predicted.device_bytes else ""
    rows.append(("memory of a rank", format_memory(memory), f"{format_memory(predicted.memory.total)}{capacity}"))
    time = predicted.time
    if time is None:
        rows.append(("time of a step", f"{step_seconds:.2f} s", f"unknown: {predicted.why_no_time}"))
        return table_lines(rows)
    rows += [
        ("time of a step", f"{step_seconds:.2f} s", f"{time.total:.2f} s"),
        ("tokens/s", f"{_tokens(rehearsal) / step_seconds:,.0f}", f"{time.tokens / time.total:,.0f}"),
        ("MFU (causal)", "", f"{time.mfu_causal:.1%}"),
        ("the whole run", "", format_duration((predicted.days or 0.0) * 86400)),
    ]
    return table_lines(rows)


def _sizes(rehearsal: RunSpec, run: RunSpec) -> Iterator[tuple[str, str, str]]:
    yield "workers", _workers(rehearsal), _workers(run)
    yield "parameters", _parameters(rehearsal), _parameters(run)
    yield "sequence", f"{rehearsal.batch.sequence_length:,}", f"{run.batch.sequence_length:,}"
    yield "batch", f"{rehearsal.batch.global_batch_size:,}", f"{run.batch.global_batch_size:,}"


def _workers(spec: RunSpec) -> str:
    return f"{resolved_world_size(spec.cluster):,} x {spec.platform.chip} ({describe_layout(spec)})"


def _parameters(spec: RunSpec) -> str:
    return "unknown" if spec.model.vocab_size is None else format_short_count(count_parameters(spec.model).total)


def _tokens(spec: RunSpec) -> int:
    return spec.batch.global_batch_size * spec.batch.sequence_length
