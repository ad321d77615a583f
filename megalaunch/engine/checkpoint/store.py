"""Save and load distributed checkpoints: independent of the parallel layout, self-describing, without pickle.

A checkpoint is a directory of safetensors shards, `tensors.json`, JSON documents, copied files, and a manifest with
hashes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megalaunch.engine.checkpoint.coordination import coordination_group, run_on_all_ranks
from megalaunch.engine.checkpoint.dcp_storage import CheckpointReader, CheckpointWriter, Hold
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.load_tensors import read_tensors
from megalaunch.engine.checkpoint.retention import latest_valid_checkpoint, prune_checkpoints
from megalaunch.engine.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES
from megalaunch.engine.dtensor import local_slice, to_local_no_grad
from megalaunch.fs import discard_directory
from megalaunch.rundir.checkpoint.contents import JSON, read_document
from megalaunch.rundir.checkpoint.manifest import MANIFEST, is_plain_name, verify_checkpoint
from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX, TensorIndex, read_tensor_index
from megalaunch.rundir.fence import Superseded

__all__ = [
    "JSON",
    "CheckpointError",
    "latest_valid_checkpoint",
    "load_checkpoint",
    "prune_checkpoints",
    "read_document",
    "read_tensors",
    "save_checkpoint",
    "verify_checkpoint",
]

Shapes: TypeAlias = Mapping[str, torch.Size]


def save_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    documents: Mapping[str, JSON],
    files: Mapping[str, Path],
    *,
    shapes: Shapes = MappingProxyType({}),
    copies: Mapping[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    wrote: Callable[[int, int], None] = lambda done, total: None,
    hold: Hold = nullcontext,
) -> None:
    """Save a checkpoint as `directory`, replacing an existing one. Collective.

    The directory appears complete and synced to disk, or not at all. In the latter case every rank raises the same
    CheckpointError, and older checkpoints are unchanged.

    Args:
        directory: the checkpoint to create.
        tensors: plain tensors (equal on all ranks that pass them, saved once) or DTensors of any mesh and placements.
        documents: JSON values, saved as `<name>.json`.
        files: files to copy, read by rank 0; equal on all ranks.
        shapes: saved shapes, by name, of tensors that are larger at run time. The rows that pad a vocabulary belong to
            a layout and are not saved.
        copies: this rank's shard of every tensor, for an async save: these values are written, and `tensors` only
            describe the sharding.
        group: a separate gloo group, for an async save.
        wrote: progress callback: (bytes written, total bytes) of this rank.
        hold: holds the right to publish, while the directory gets its name; it may raise Superseded, on all ranks.
    """
    _require_names(tensors, documents, files)
    writer = CheckpointWriter(directory, documents, files, wrote, hold)
    try:
        with _dcp_errors(directory, "save"):
            save(
                dict(tensors),
                storage_writer=writer,
                planner=_SavePlanner(copies, shapes),
                process_group=group or coordination_group(),
                no_dist=not dist.is_initialized(),
            )
    finally:
        if writer.unfinished is not None:  # after a commit that directory no longer exists, and this does nothing
            discard_directory(writer.unfinished)


class _SavePlanner(DefaultSavePlanner):
    """Plans by the tensors' sharding and writes the values of `copies`, if given.

    A tensor in `shapes` is cut to that shape.
    """

    def __init__(self, copies: Mapping[str, torch.Tensor] | None, shapes: Shapes) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies, self._shapes = copies, shapes

    def create_local_plan(self) -> SavePlan:
        """Return the chunks that this rank writes."""
        plan = super().create_local_plan()
        return replace(plan, items=[cut for item in plan.items if (cut := self._cut(item)) is not None])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the values of a chunk, cut to the saved shape."""
        data = super().resolve_data(write_item)
        if write_item.index.fqn in self._shapes:
            assert isinstance(data, torch.Tensor)
            assert write_item.tensor_data is not None
            for dim, size in enumerate(write_item.tensor_data.chunk.sizes):
                data = data.narrow(dim, 0, size)
        return data

    def _cut(self, item: WriteItem) -> WriteItem | None:
        """Cut a chunk to the saved shape; None if no element is left."""
        shape, data = self._shapes.get(item.index.fqn), item.tensor_data
        if shape is None or data is None:
            return item
        offsets = data.chunk.offsets
        sizes = [min(size, end - start) for size, start, end in zip(data.chunk.sizes, offsets, shape, strict=True)]
        if min(sizes) <= 0:
            return None
        return replace(
            item, tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets, torch.Size(sizes)), size=shape)
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the local values of a tensor; a rank holds at most one chunk of it."""
        return super().lookup_object(index) if self._copies is None else self._copies[index.fqn]


def load_checkpoint(
    directory: Path, tensors: Mapping[str, torch.Tensor], shapes: Shapes = MappingProxyType({})
) -> None:
    """Fill `tensors` in place from a checkpoint saved under any layout. Collective.

    Hashes are not verified here: choose the checkpoint with `latest_valid_checkpoint`, or call `verify_checkpoint`.

    Args:
        directory: the checkpoint.
        tensors: the tensors to fill. The names of all ranks together must equal those of the checkpoint, with the same
            shapes and dtypes.
        shapes: as for `save_checkpoint`; rows beyond them are filled with zeros.

    Raises:
        CheckpointError: lists every difference; the same on all ranks.
    """
    tensor_index = run_on_all_ranks(lambda: read_tensor_index(directory))[0]
    _require_match(directory, tensor_index, tensors, shapes)
    with _dcp_errors(directory, "load"):
        load(
            dict(tensors),
            storage_reader=CheckpointReader(directory, tensor_index, {name: tensors[name].shape for name in shapes}),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=coordination_group(),
            no_dist=not dist.is_initialized(),
        )
    for name, shape in shapes.items():
        _zero_padding(tensors[name], shape)


def _zero_padding(tensor: torch.Tensor, shape: torch.Size) -> None:
    """Zero this rank's rows beyond `shape`: their memory may be uninitialised, and 0 x NaN is NaN."""
    (first, count), *_ = local_slice(tensor)
    stored = max(0, min(count, shape[0] - first))
    to_local_no_grad(tensor)[stored:].zero_()


def _require_names(tensors: Mapping[str, object], documents: Mapping[str, object], files: Mapping[str, object]) -> None:
    """Raise ValueError for a programming error in the arguments, before anything is written."""
    names = [MANIFEST, TENSOR_INDEX, *files, *(f"{name}.json" for name in documents)]
    if len(set(names)) != len(names) or not all(is_plain_name(name) for name in names):
        raise ValueError(f"documents and files of a checkpoint need distinct plain names: {sorted(names)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPE_NAMES or tensor.is_meta:
            raise ValueError(f"{name!r} cannot be saved in a checkpoint: {type(tensor).__name__}")


def _require_match(
    directory: Path, tensor_index: TensorIndex, tensors: Mapping[str, torch.Tensor], shapes: Shapes
) -> None:
    """Raise CheckpointError that lists all differences between a checkpoint and the ranks' tensors. Collective."""

    def differences() -> tuple[set[str], set[str]]:
        found = set()
        for name, tensor in tensors.items():
            stored, shape = tensor_index.get(name), shapes.get(name, tensor.shape)
            if stored is None:
                found.add(f"missing in the checkpoint: {name}")
            elif stored.shape != shape:
                found.add(f"{name} has the shape {list(stored.shape)} in the checkpoint, {list(shape)} in the run")
            elif DTYPES[stored.dtype] != tensor.dtype:
                found.add(f"{name} is {DTYPES[stored.dtype]} in the checkpoint, {tensor.dtype} in the run")
        return set(tensors), found

    per_rank = run_on_all_ranks(differences)
    names = set().union(*(names for names, _ in per_rank))
    problems = set().union(*(found for _, found in per_rank))
    problems |= {f"unexpected in the checkpoint: {name}" for name in tensor_index if name not in names}
    if problems:
        raise CheckpointError(f"the checkpoint {directory} does not match the run: {'; '.join(sorted(problems))}")


@contextmanager
def _suppress_single_process_warning() -> Iterator[None]:
    """Suppress DCP's warning about a missing process group. Filters affect all threads, so only without a group."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _dcp_errors(directory: Path, action: str) -> Iterator[None]:
    """Convert DCP's exception to the CheckpointError of the lowest failed rank, on every rank."""
    try:
        with _suppress_single_process_warning():
            yield
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items())
        if isinstance(cause, CheckpointError | Superseded):
            raise cause from None
        raise CheckpointError(
            f"cannot {action} the checkpoint {directory}: rank {rank}: {type(cause).__name__}: {cause}"
        ) from failure
