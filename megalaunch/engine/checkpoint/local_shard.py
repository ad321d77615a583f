"""Write and load the shard of one rank: its tensors as they are in this layout, for a local checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.atomic_directory import Wrote, atomic_directory, count_bytes
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPE_NAMES, HashedFile, MappedFile, TensorSource, write_file
from megalaunch.engine.dtensor import local_slice, to_local_no_grad
from megalaunch.rundir.checkpoint.contents import JSON, POSITION
from megalaunch.rundir.checkpoint.local_shards import SHARD, SHARD_TENSORS, LocalShard, shard_directory
from megalaunch.rundir.checkpoint.manifest import MANIFEST, manifest_text


def layout_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes and slices of this rank's tensors: of its place in the layout."""
    described = {
        name: [DTYPE_NAMES[tensor.dtype], list(tensor.shape), local_slice(tensor)] for name, tensor in tensors.items()
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def write_shard(
    folder: Path,
    shard: LocalShard,
    tensors: Mapping[str, Tensor],
    position: JSON,
    wrote: Wrote,
    check: Callable[[], None],
) -> None:
    """Write a shard into the folder of this node, complete and synced to disk, or not at all.

    Args:
        folder: the folder of the node.
        shard: the description of the shard.
        tensors: the values of this rank.
        position: the progress of the run.
        wrote: progress callback: (bytes written, total bytes).
        check: called before the shard gets its name; may raise Superseded.

    Raises:
        CheckpointError: it cannot be written.
    """
    sources = {
        name: TensorSource(values.dtype, tuple(values.shape), partial(tensors.__getitem__, name))
        for name, values in tensors.items()
    }
    total = sum(source.size for source in sources.values())
    with atomic_directory(shard_directory(folder, shard.rank, shard.step), total) as unfinished:
        records = [write_file(unfinished / SHARD_TENSORS, sources, count_bytes(total, wrote))]
        for name, document in ((POSITION, position), (SHARD, shard.to_document())):
            with HashedFile(unfinished / f"{name}.json") as file:
                file.write(json.dumps(document).encode())
            records.append(file.record)
        with HashedFile(unfinished / MANIFEST) as file:
            file.write(manifest_text(records).encode())
        check()


def load_shard(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of `tensors` in place. Raises CheckpointError if one is missing or has another shape."""
    file = MappedFile(directory / SHARD_TENSORS)
    with torch.no_grad():
        for name, tensor in tensors.items():
            target, saved = to_local_no_grad(tensor), file.tensor(name)
            if (saved.dtype, saved.shape) != (target.dtype, target.shape):
                raise CheckpointError(
                    f"{file.path}: {name!r} is {saved.dtype} {list(saved.shape)}, the run has {target.dtype} "
                    f"{list(target.shape)}"
                )
            target.copy_(saved)
