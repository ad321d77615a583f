"""Format checkpoints as lines: the list of a run, the content of one checkpoint, the result of a verification."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalaunch.cli.checkpoint.summary import tensor_group
from megalaunch.format.numbers import format_bytes
from megalaunch.format.table import table_lines
from megalaunch.rundir.checkpoint.listing import CheckpointInfo, retention_reasons
from megalaunch.runs.catalog.local_checkpoints import LocalCheckpointInfo
from megalaunch.schema import RunSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def list_rows(found: Sequence[CheckpointInfo], spec: RunSpec | None) -> list[dict[str, Any]]:
    """Return a row per checkpoint; `retained`: why it is retained, None if the next save removes it or spec is None."""
    reasons: Mapping[int, str] = {}
    if spec is not None:
        steps = [one.step for one in found]
        reasons = retention_reasons(steps, spec.checkpoint.keep_last, spec.checkpoint.keep_every)
    return [
        {
            "step": one.step,
            "path": str(one.path),
            "bytes": one.size,
            "saved": one.saved,
            "complete": not one.problems,
            "problems": list(one.problems),
            "retained": reasons.get(one.step),
        }
        for one in found
    ]


def list_lines(
    folder: Path, rows: Sequence[Mapping[str, Any]], unfinished: Mapping[str, int], locked: bool
) -> Iterator[str]:
    """Yield the list of a run's checkpoints."""
    total = sum(row["bytes"] for row in rows)
    yield f"{folder}: {len(rows)} checkpoint{'s' if len(rows) != 1 else ''}, {format_bytes(total)}"
    if rows:
        table = [("step", "saved", "size", "state", "retained")]
        for row in rows:
            state = "complete" if row["complete"] else row["problems"][0]
            retained = row["retained"] or "until the next save"
            table.append((str(row["step"]), _date(row["saved"]), format_bytes(row["bytes"]), state, retained))
        yield from table_lines(table, right=(0, 2))
    for name, size in unfinished.items():
        state = "a save in progress" if locked else "an interrupted save, removed when the run starts again"
        yield f"  {name}, {format_bytes(size)}: {state}"


def local_rows(found: Sequence[LocalCheckpointInfo]) -> list[dict[str, Any]]:
    """Return a row for each node's part of a local checkpoint, as plain JSON."""
    return [
        {
            "step": one.step,
            "node": one.node,
            "tier": one.tier,
            "folder": str(one.folder),
            "bytes": one.size,
            "saved": one.saved,
            "complete": one.problem is None,
            "problem": one.problem,
        }
        for one in found
    ]


def local_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the list of a run's checkpoints in the memory and on the disk of this machine; nothing without any."""
    if not rows:
        return
    total = format_bytes(sum(row["bytes"] for row in rows))
    yield f"{' and '.join(sorted({row['folder'] for row in rows}))}: {total} on this machine"
    table = [("step", "node", "tier", "saved", "size", "state")]
    for row in rows:
        state = row["problem"] or "complete"
        size = format_bytes(row["bytes"])
        table.append((str(row["step"]), str(row["node"]), row["tier"], _date(row["saved"]), size, state))
    yield from table_lines(table, right=(0, 1, 4))


def inspect_lines(checkpoint: Path, summary: Mapping[str, Any], every: bool) -> Iterator[str]:
    """Yield the content of one checkpoint."""
    problems, files = summary["problems"], summary["files"]
    yield f"{checkpoint}: {problems[0] if problems else 'complete'}, saved {_date(summary['saved'])}"
    converted, tokens = summary["step"] is None, summary["tokens"]
    step = "none: converted weights, without optimizer and progress" if converted else str(summary["step"])
    yield f"  step     {step}" + (f", {tokens:,} tokens seen" if isinstance(tokens, int) else "")
    if summary["model"] is not None:
        yield f"  model    {summary['model']['name']} ({summary['model']['family']})"
    layout = "whole tensors; loads under any layout"
    if not converted:
        layout = f"{_layout_text(summary['layout'])}; loads under any other layout too"
    yield f"  layout   {layout}"
    shards = [entry["bytes"] for name, entry in files.items() if name.endswith(".safetensors")]
    others = len(files) - len(shards)
    yield f"  files    {len(shards)} with tensors, {others} others, {format_bytes(summary['bytes'])} in all"
    yield ""
    alike = [] if every else _is_model_shape(summary["tensors"])
    tensors = {name: tensor for name, tensor in summary["tensors"].items() if tensor_group(name) not in alike}
    yield from table_lines([("tensor", "dtype", "shape", "size", ""), *_tensor_rows(tensors, every)], right=(3,))
    if alike:
        yield f"  {' and '.join(alike)}: a tensor for each of the model's, of its shape"
    yield ""
    totals = [
        (name, f"{total['tensors']} tensors", f"{total['values']:,} values", format_bytes(total["bytes"]))
        for name, total in summary["totals"].items()
    ]
    yield from table_lines(totals, right=(1, 2, 3))


def verification_lines(checkpoint: Path, sizes: Sequence[int], problems: Sequence[str]) -> Iterator[str]:
    """Yield the result of comparing every byte with its checksum."""
    if not problems:
        yield f"{checkpoint}: valid. {len(sizes)} files, {format_bytes(sum(sizes))}, all checksums match"
        return
    yield f"{checkpoint}: damaged"
    for problem in problems:
        yield f"  {problem}"


def _is_model_shape(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the groups (optimizer moments) with the same tensors as the model: names, dtypes and shapes."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        group = tensor_group(name)
        kinds.setdefault(group, {})[name.removeprefix(group)] = (tensor["dtype"], tensor["shape"])
    return [group for group in kinds if group != "model" and kinds[group] == kinds.get("model")]


def _tensor_rows(tensors: Mapping[str, Mapping[str, Any]], every: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row per tensor; without `every`, tensors that differ only in the numbers of their names share a row."""

    def kind(name: str) -> tuple[str, ...]:
        alike = name if every else _NUMBER.sub("*", name)
        return (tensor_group(name), alike, tensors[name]["dtype"], str(tensors[name]["shape"]))

    for (_, name, dtype, shape), names in itertools.groupby(sorted(tensors, key=kind), kind):
        members = list(names)
        size = sum(tensors[member]["bytes"] for member in members)
        yield name, dtype, shape, format_bytes(size), f"x {len(members)}" if len(members) > 1 else ""


def _layout_text(layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return "unknown (not in its spec.yaml)"
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.items() if axis not in ("ranks", "data_sharding"))
    ranks = "one rank" if layout["ranks"] == 1 else f"{layout['ranks']} ranks"
    return f"{ranks}{f': {axes}' if axes else ''}, data sharding {layout['data_sharding']}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
