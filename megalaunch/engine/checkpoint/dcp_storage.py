"""DCP storage backend: one safetensors file per rank, JSON for everything else, committed by one rename.

DCP plans which rank writes and reads which chunk under any layout. Its default storage pickles, so it is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalaunch.engine.checkpoint.atomic_directory import Wrote, count_bytes
from megalaunch.engine.checkpoint.errors import CheckpointError, free_bytes, no_space, write_error
from megalaunch.engine.checkpoint.load_tensors import stored_slice
from megalaunch.engine.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    HashedFile,
    MappedFile,
    TensorSource,
    write_file,
)
from megalaunch.fs import create_temporary_directory, make_directory, publish_directory
from megalaunch.rundir.checkpoint.manifest import MANIFEST, FileRecord, manifest_text
from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX, Chunk, StoredTensor, TensorIndex, tensor_index_text

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class _RankFiles:
    """Sent by the coordinator to a rank: its file, and the size of the checkpoint over all ranks in bytes."""

    path: str
    needed: int


Hold = Callable[[], AbstractContextManager[None]]
"""Holds the right to publish until its context ends; raises Superseded without it."""


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint. DCP calls the methods in order and raises an exception of one rank on every rank."""

    def __init__(
        self,
        directory: Path,
        documents: Mapping[str, Any],
        files: Mapping[str, Path],
        wrote: Wrote,
        hold: Hold,
    ) -> None:
        self._directory, self._files, self._wrote, self._hold = directory, files, wrote, hold
        self._texts = {f"{name}.json": json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
        self._needed = 0
        self.unfinished: Path | None = None  # set on the coordinator only

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP never selects this storage by path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DCP calls the coordinator's methods on the coordinator only."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the local plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the free space, create the temporary directory, and assign a file to each rank. Coordinator only."""
        self._needed = sum(_source(item, None).size for plan in plans for item in plan.items)
        try:
            self._needed += sum(path.stat().st_size for path in self._files.values())
            free = free_bytes(self._directory.parent)
            if free < self._needed:
                raise no_space(self._directory, self._needed, free)
            make_directory(self._directory.parent)
            self.unfinished = create_temporary_directory(self._directory)
        except OSError as error:
            raise write_error(self._directory, None, self._needed, error) from error
        return [
            replace(plan, storage_data=_RankFiles(str(self.unfinished / f"shard_{rank:05d}.safetensors"), self._needed))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to its file."""
        share: _RankFiles = plan.storage_data
        results = []
        if plan.items:
            sources = {item.index.fqn: _source(item, planner) for item in plan.items}
            assert len(sources) == len(plan.items), "a rank holds at most one part of a tensor"
            try:
                total = sum(source.size for source in sources.values())
                record = write_file(Path(share.path), sources, count_bytes(total, self._wrote))
            except OSError as error:
                raise write_error(self._directory, Path(share.path).parent, share.needed, error) from error
            results = [WriteResult(item.index, sources[item.index.fqn].size, record) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write documents, copied files and manifest, then publish. Coordinator only, after all ranks wrote."""
        assert self.unfinished is not None
        records_by_index = {result.index: result.storage_data for share in results for result in share}
        shards: set[FileRecord] = set(records_by_index.values())
        tensor_index = _make_tensor_index(metadata, {index: record.name for index, record in records_by_index.items()})
        try:
            _require_visible(self.unfinished, self._directory, shards)
            texts = {TENSOR_INDEX: tensor_index_text(tensor_index), **self._texts}
            records = [_write_text(self.unfinished / name, text) for name, text in texts.items()]
            records += [_copy(source, self.unfinished / name) for name, source in self._files.items()]
            _write_text(self.unfinished / MANIFEST, manifest_text([*records, *shards]))
            with self._hold():
                publish_directory(self.unfinished, self._directory)
        except OSError as error:
            raise write_error(self._directory, self.unfinished, self._needed, error) from error


class CheckpointReader(StorageReader):
    """Reads the chunks that a rank needs.

    `tensor_index` is validated. `shapes` gives the runtime shapes of tensors that are larger than their stored ones (a
    padded vocabulary); no stored chunk covers the padding rows.
    """

    def __init__(self, directory: Path, tensor_index: TensorIndex, shapes: Mapping[str, torch.Size]) -> None:
        self._directory, self._tensor_index, self._shapes = directory, tensor_index, shapes
        self._places: Mapping[MetadataIndex, str] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP never selects this storage by path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint."""
        return _make_metadata(self._tensor_index, self._shapes)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Save the map from chunk to file."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the local plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: ranks read independently."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned slice from its file into its target tensor."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index], []).append(item)
        for name, items in by_file.items():
            file = MappedFile(self._directory / name)
            for item in items:
                part = _stored_part(file, item.storage_index, self._tensor_index)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.detach().copy_(part)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _make_tensor_index(metadata: Metadata, files: Mapping[MetadataIndex, str]) -> dict[str, StoredTensor]:
    """Build the tensor index from DCP's metadata. `files` maps each chunk to the name of its file."""
    tensor_index = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = tuple(
            Chunk(tuple(chunk.offsets), tuple(chunk.sizes), files[MetadataIndex(name, chunk.offsets)])
            for chunk in stored.chunks
        )
        tensor_index[name] = StoredTensor(DTYPE_NAMES[stored.properties.dtype], tuple(stored.size), chunks)
    return tensor_index


def _make_metadata(tensor_index: TensorIndex, shapes: Mapping[str, torch.Size]) -> Metadata:
    """Build the metadata that DCP plans a load from. `storage_data` maps each chunk to its file."""
    stored = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
            size=shapes.get(name, torch.Size(tensor.shape)),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks
            ],
        )
        for name, tensor in tensor_index.items()
    }
    storage_data = {
        MetadataIndex(name, chunk.offsets): chunk.file
        for name, tensor in tensor_index.items()
        for chunk in tensor.chunks
    }
    return Metadata(state_dict_metadata=dict(stored), storage_data=storage_data)


def _stored_part(file: MappedFile, index: MetadataIndex, tensor_index: TensorIndex) -> torch.Tensor:
    """Return one stored chunk, checked against the tensor index."""
    stored = tensor_index[index.fqn]
    shape = next(chunk.shape for chunk in stored.chunks if chunk.offsets == index.offset)
    return stored_slice(file, index.fqn, DTYPES[stored.dtype], shape)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned; everything else is JSON"
    return item.tensor_data


def _source(item: WriteItem, planner: SavePlanner | None) -> TensorSource:
    """Return a chunk as a TensorSource. Without a planner only its dtype and shape can be used."""

    def data() -> torch.Tensor:
        assert planner is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return TensorSource(_data(item).properties.dtype, tuple(_data(item).chunk.sizes), data)


def _require_visible(unfinished: Path, directory: Path, shards: set[FileRecord]) -> None:
    """Raise CheckpointError if rank 0 cannot see the other ranks' files: the filesystem is not shared."""
    hidden = sorted(record.name for record in shards if not (unfinished / record.name).exists())
    if hidden:
        raise CheckpointError(
            f"cannot save the checkpoint {directory}: rank 0 cannot find {', '.join(hidden)}, which another rank "
            f"wrote; put the run directory on a file system that all nodes share"
        )


def _write_text(path: Path, text: str) -> FileRecord:
    with HashedFile(path) as file:
        file.write(text.encode())
    return file.record


def _copy(source: Path, path: Path) -> FileRecord:
    with source.open("rb") as original, HashedFile(path) as file:
        while data := original.read(_COPY_BYTES):
            file.write(data)
    return file.record
