"""Write a checkpoint from foreign weights: one tensor at a time, verified, then committed by a rename."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.atomic_directory import Wrote, atomic_directory, count_bytes
from megalaunch.engine.checkpoint.safetensors_file import DTYPE_NAMES, HashedFile, TensorSource, write_file
from megalaunch.engine.weight_maps.weight_mapping import holds_experts
from megalaunch.rundir.checkpoint.contents import ORIGIN, ORIGIN_FILE, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.checkpoint.manifest import MANIFEST, FileRecord, manifest_text
from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX, Chunk, StoredTensor, tensor_index_text
from megalaunch.schema import RunSpec, build_run_spec
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.spec_file import spec_to_text

PROOF = "proof.json"
_SHARD_BYTES = 5_000_000_000


class SourceWeights(Protocol):
    """Foreign weights mapped to the decoder's parameters: validated, not yet read."""

    model: ModelSpec
    shapes: Mapping[str, torch.Size]

    @property
    def origin(self) -> Mapping[str, object]:
        """The document about the weights' origin that the checkpoint saves."""

    def companions(self) -> Mapping[str, Path]:
        """Return the files to copy with the weights."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a parameter."""

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a parameter, or one expert of a parameter that stacks them."""


def write_imported_checkpoint(
    weights: SourceWeights, tokenizer: str | None, output: Path, prove: Callable[[Path], dict[str, Any]], wrote: Wrote
) -> None:
    """Write a checkpoint, verify it with `prove`, and save its report as proof.json.

    Args:
        weights: the source weights.
        tokenizer: text of a tokenizer.json, or None.
        output: the directory to create.
        prove: compares the source with the written directory; returns a report, or raises CheckpointError.
        wrote: progress callback in bytes.

    Raises:
        CheckpointError: nothing is left behind.
    """
    sources = {
        WEIGHTS + name: TensorSource(weights.dtype(name), tuple(shape), partial(_data, weights, name))
        for name, shape in weights.shapes.items()
    }
    total = sum(source.size for source in sources.values())
    with atomic_directory(output, total) as unfinished:
        records = list(_write(unfinished, weights, tokenizer, sources, count_bytes(total, wrote)))
        report = prove(unfinished)
        records.append(_text(unfinished / PROOF, json.dumps(report, indent=1) + "\n"))
        _text(unfinished / MANIFEST, manifest_text(records))


def _data(weights: SourceWeights, name: str) -> Tensor | Iterator[Tensor]:
    """Read a parameter to write it, one expert at a time."""
    if holds_experts(name):
        return (weights.read(name, expert) for expert in range(weights.shapes[name][0]))
    return weights.read(name)


def _write(
    unfinished: Path,
    weights: SourceWeights,
    tokenizer: str | None,
    sources: dict[str, TensorSource],
    count: Callable[[int], None],
) -> Iterator[FileRecord]:
    """Write shards, tensor index, spec, origin, companion files and tokenizer; yield a record of each file."""
    tensor_index = {}
    for number, names in enumerate(_shards(sources)):
        file = f"shard_{number:05d}.safetensors"
        yield write_file(unfinished / file, {name: sources[name] for name in names}, count)
        for name in names:
            chunk = Chunk((0,) * len(sources[name].shape), sources[name].shape, file)
            tensor_index[name] = StoredTensor(DTYPE_NAMES[sources[name].dtype], sources[name].shape, (chunk,))
    yield _text(unfinished / TENSOR_INDEX, tensor_index_text(tensor_index))
    yield _text(unfinished / SPEC_FILE, spec_to_text(make_spec(weights.model)))
    yield _text(unfinished / f"{ORIGIN}.json", json.dumps(dict(weights.origin), indent=1) + "\n")
    for name, path in weights.companions().items():
        yield _copy_file(unfinished / (ORIGIN_FILE + name), path.read_bytes())
    if tokenizer is not None:
        yield _text(unfinished / TOKENIZER_FILE, tokenizer)


def _shards(sources: dict[str, TensorSource]) -> Iterator[list[str]]:
    """Group tensor names into files of at most `_SHARD_BYTES`."""
    names: list[str] = []
    shard_bytes = 0
    for name, source in sources.items():
        if names and shard_bytes + source.size > _SHARD_BYTES:
            yield names
            names, shard_bytes = [], 0
        names.append(name)
        shard_bytes += source.size
    yield names


def make_spec(model: ModelSpec) -> RunSpec:
    """Make a RunSpec of `model` with defaults elsewhere: enough to generate, to export and to start a run from."""
    length = min(model.max_position_embeddings, 4096)
    return build_run_spec(
        {
            "model": asdict(model),
            "batch": {"sequence_length": length, "global_batch_size": 1},
            "train": {"steps": 1},
            "data": {"mock": True},
        }
    )


def _text(path: Path, text: str) -> FileRecord:
    return _copy_file(path, text.encode())


def _copy_file(path: Path, content: bytes) -> FileRecord:
    with HashedFile(path) as file:
        file.write(content)
    return file.record
