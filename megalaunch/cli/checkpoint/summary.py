"""Summarize a checkpoint as plain data: step, layout, files, tensors, totals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megalaunch.plan.topology import Topology
from megalaunch.rundir.checkpoint.contents import POSITION, read_document
from megalaunch.rundir.checkpoint.errors import CheckpointError
from megalaunch.rundir.checkpoint.manifest import POSITION_FILE, read_manifest, verify_checkpoint
from megalaunch.rundir.checkpoint.tensor_index import TensorIndex, read_tensor_index
from megalaunch.schema import RunSpec


def summarize_checkpoint(checkpoint: Path, spec: RunSpec | None) -> dict[str, Any]:
    """Summarize a checkpoint without reading its tensors.

    Args:
        spec: the run spec stored in the checkpoint.

    Raises:
        CheckpointError: the manifest, the index or the position cannot be read.
    """
    try:
        records = read_manifest(checkpoint)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    tensor_index = read_tensor_index(checkpoint)
    of_run = any(record.name == POSITION_FILE for record in records)  # converted weights have no progress
    position = read_document(checkpoint, POSITION) if of_run else {"step": None, "tokens": None}
    if not isinstance(position, dict):
        raise CheckpointError(f"{checkpoint / POSITION}.json holds no step")
    return {
        "path": str(checkpoint),
        "step": position.get("step"),
        "tokens": position.get("tokens"),
        "saved": checkpoint.stat().st_mtime,
        "problems": verify_checkpoint(checkpoint, hashes=False),
        "model": None if spec is None else {"name": spec.model.name, "family": spec.model.family},
        "layout": None if spec is None else _layout(spec),
        "files": {record.name: {"bytes": record.size, "sha256": record.sha256} for record in records},
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.size,
                "parts": [
                    {"offsets": list(chunk.offsets), "shape": list(chunk.shape), "file": chunk.file}
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in sorted(tensor_index.items())
        },
        "totals": _totals(tensor_index),
        "bytes": sum(record.size for record in records),
    }


def tensor_group(name: str) -> str:
    """Return the group of a tensor: `model`, or `optimizer.<moment>`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first


def _totals(tensor_index: TensorIndex) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for name, tensor in sorted(tensor_index.items()):
        total = totals.setdefault(tensor_group(name), {"tensors": 0, "values": 0, "bytes": 0})
        total["tensors"] += 1
        total["values"] += math.prod(tensor.shape)
        total["bytes"] += tensor.size
    return totals


def _layout(spec: RunSpec) -> dict[str, Any] | None:
    try:
        topology = Topology.from_spec(spec)
    except ValueError:  # no spec that a launch has resolved
        return None
    axes = {axis: getattr(topology, axis) for axis in ("dp", "pp", "cp", "tp", "ep") if getattr(topology, axis) > 1}
    return {"ranks": topology.world, **axes, "data_sharding": spec.parallel.data_sharding}
