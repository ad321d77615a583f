"""DCP's storage, ours: a safetensors file a rank, JSON for all else, published by one rename.

DCP plans who writes and reads which part under any layout; its default storage pickles, so it is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

from megalaunch.engine.checkpoint import commit
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
from megalaunch.rundir.checkpoint.manifest import MANIFEST, FileRecord, manifest_text
from megalaunch.rundir.checkpoint.tensor_index import CATALOGUE, Catalogue, Chunk, StoredTensor, tensor_index_text

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class _RankFiles:
    """What the coordinator tells a rank: where to write, and the size in bytes of the whole checkpoint."""

    path: str
    needed: int


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint. DCP calls the methods in order; an exception in one reaches every rank through it."""

    def __init__(
        self,
        directory: Path,
        documents: Mapping[str, Any],
        files: Mapping[str, Path],
        wrote: Wrote,
    ) -> None:
        self._directory, self._files, self._wrote = directory, files, wrote
        self._texts = {f"{name}.json": json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
        self._needed = 0
        self.unfinished: Path | None = None  # known to the coordinator only

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP never chooses this storage by itself."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The coordinator is known from what it is called for."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Every part is written as planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: see that there is space, make the temporary directory, name everyone's file."""
        self._needed = sum(_source(item, None).size for plan in plans for item in plan.items)
        try:
            self._needed += sum(path.stat().st_size for path in self._files.values())
            free = free_bytes(self._directory.parent)
            if free < self._needed:
                raise no_space(self._directory, self._needed, free)
            self.unfinished = commit.create_temp(self._directory)
        except OSError as error:
            raise write_error(self._directory, None, self._needed, error) from error
        return [
            replace(plan, storage_data=_RankFiles(str(self.unfinished / f"shard_{rank:05d}.safetensors"), self._needed))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts into its own file."""
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
        """On the coordinator, when every rank has written: everything that is no tensor, the manifest, the rename."""
        assert self.unfinished is not None
        places = {result.index: result.storage_data for share in results for result in share}
        shards: set[FileRecord] = set(places.values())
        catalogue = _make_tensor_index(metadata, {index: record.name for index, record in places.items()})
        try:
            _require_visible(self.unfinished, self._directory, shards)
            texts = {CATALOGUE: tensor_index_text(catalogue), **self._texts}
            records = [_write_text(self.unfinished / name, text) for name, text in texts.items()]
            records += [_copy(source, self.unfinished / name) for name, source in self._files.items()]
            _write_text(self.unfinished / MANIFEST, manifest_text([*records, *shards]))
            commit.commit(self.unfinished, self._directory)
        except OSError as error:
            raise write_error(self._directory, self.unfinished, self._needed, error) from error


class CheckpointReader(StorageReader):
    """Reads the parts that a rank needs. The catalogue was read and checked before.

    `shapes` are those of tensors that are longer here than what is stored of them: no part of theirs fills the rest.
    """

    def __init__(self, directory: Path, catalogue: Catalogue, shapes: Mapping[str, torch.Size]) -> None:
        self._directory, self._catalogue, self._shapes = directory, catalogue, shapes
        self._places: Mapping[MetadataIndex, str] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP never chooses this storage by itself."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        return _make_metadata(self._catalogue, self._shapes)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember which file holds which part."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every part is read as planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read on their own."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each part from its file into the tensor that waits for it."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index], []).append(item)
        for name, items in by_file.items():
            file = MappedFile(self._directory / name)
            for item in items:
                part = _stored_part(file, item.storage_index, self._catalogue)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.detach().copy_(part)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _make_tensor_index(metadata: Metadata, files: Mapping[MetadataIndex, str]) -> dict[str, StoredTensor]:
    """The catalogue of what DCP planned; `files` says where each chunk was written."""
    catalogue = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = tuple(
            Chunk(tuple(chunk.offsets), tuple(chunk.sizes), files[MetadataIndex(name, chunk.offsets)])
            for chunk in stored.chunks
        )
        catalogue[name] = StoredTensor(DTYPE_NAMES[stored.properties.dtype], tuple(stored.size), chunks)
    return catalogue


def _make_metadata(catalogue: Catalogue, shapes: Mapping[str, torch.Size]) -> Metadata:
    """What DCP needs to plan a load. `storage_data` maps each chunk to its file."""
    stored = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
            size=shapes.get(name, torch.Size(tensor.shape)),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks
            ],
        )
        for name, tensor in catalogue.items()
    }
    places = {
        MetadataIndex(name, chunk.offsets): chunk.file for name, tensor in catalogue.items() for chunk in tensor.chunks
    }
    return Metadata(state_dict_metadata=dict(stored), storage_data=places)


def _stored_part(file: MappedFile, index: MetadataIndex, catalogue: Catalogue) -> torch.Tensor:
    stored = catalogue[index.fqn]
    shape = next(chunk.shape for chunk in stored.chunks if chunk.offsets == index.offset)
    return stored_slice(file, index.fqn, DTYPES[stored.dtype], shape)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned; everything else is JSON"
    return item.tensor_data


def _source(item: WriteItem, planner: SavePlanner | None) -> TensorSource:
    def data() -> torch.Tensor:
        assert planner is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return TensorSource(_data(item).properties.dtype, tuple(_data(item).chunk.sizes), data)


def _require_visible(unfinished: Path, directory: Path, shards: set[FileRecord]) -> None:
    hidden = sorted(record.name for record in shards if not (unfinished / record.name).exists())
    if hidden:
        raise CheckpointError(
            f"cannot save the checkpoint {directory}: rank 0 does not see {', '.join(hidden)}, which another rank "
            f"wrote; the run directory must be on a filesystem that all nodes share"
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
