"""A Hugging Face folder becomes a checkpoint of ours, tensor by tensor, in the format that they are stored in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megalaunch.config.schema import RunSpec, build_run_spec
from megalaunch.config.schema.model import ModelSpec
from megalaunch.config.spec_file import spec_to_text
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint import publish
from megalaunch.engine.checkpoint.errors import CheckpointError, free_bytes, no_space, write_error
from megalaunch.engine.checkpoint.foreign import ForeignWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.safetensors_file import DTYPE_NAMES, HashedFile, TensorSource, write_file
from megalaunch.rundir.checkpoint.catalogue import CATALOGUE, Chunk, StoredTensor, catalogue_text
from megalaunch.rundir.checkpoint.contents import ORIGIN, ORIGIN_FILE, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.checkpoint.manifest import MANIFEST, FileRecord, manifest_text

PROOF = "proof.json"
_SHARD_BYTES = 5_000_000_000
Prove = Callable[[ForeignWeights, Path], dict[str, Any]]
"""Compares the folder with what was written; raises CheckpointError where they differ, else gives the report."""


def import_folder(directory: Path, output: Path, prove: Prove) -> ForeignWeights:
    """Write the checkpoint `output` and its proof; raises CheckpointError, and then nothing is left behind."""
    if output.exists():
        raise CheckpointError(f"{output} exists; name another directory")
    folder = HuggingFaceFolder(directory)
    weights = ForeignWeights(folder)
    sources = {
        WEIGHTS + name: TensorSource(weights.dtype(name), tuple(shape), partial(weights.read, name))
        for name, shape in weights.shapes.items()
    }
    needed = sum(source.size for source in sources.values())
    if free_bytes(output.parent) < needed:
        raise no_space(output, needed, free_bytes(output.parent))
    unfinished = None
    try:
        unfinished = publish.begin(output)
        records = list(_write(unfinished, weights, folder, sources))
        report = prove(weights, unfinished)
        records.append(_text(unfinished / PROOF, json.dumps(report, indent=1) + "\n"))
        _text(unfinished / MANIFEST, manifest_text(records))
        publish.publish(unfinished, output)
    except OSError as error:
        raise write_error(output, unfinished, needed, error) from error
    finally:
        if unfinished is not None:
            publish.discard(unfinished)
    return weights


def _write(
    unfinished: Path, weights: ForeignWeights, folder: HuggingFaceFolder, sources: dict[str, TensorSource]
) -> Iterator[FileRecord]:
    catalogue = {}
    for number, names in enumerate(_shards(sources)):
        file = f"shard_{number:05d}.safetensors"
        yield write_file(unfinished / file, {name: sources[name] for name in names})
        for name in names:
            chunk = Chunk((0,) * len(sources[name].shape), sources[name].shape, file)
            catalogue[name] = StoredTensor(DTYPE_NAMES[sources[name].dtype], sources[name].shape, (chunk,))
    yield _text(unfinished / CATALOGUE, catalogue_text(catalogue))
    yield _text(unfinished / SPEC_FILE, spec_to_text(spec_of(weights.model)))
    yield _text(unfinished / f"{ORIGIN}.json", json.dumps(weights.origin, indent=1) + "\n")
    for name, path in folder.companions().items():
        yield _copied(unfinished / (ORIGIN_FILE + name), path.read_bytes())
    tokenizer = tokenizer_text(folder)
    if tokenizer is not None:
        yield _text(unfinished / TOKENIZER_FILE, tokenizer)


def _shards(sources: dict[str, TensorSource]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, source in sources.items():
        if names and held + source.size > _SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += source.size
    yield names


def spec_of(model: ModelSpec) -> RunSpec:
    """A spec with the model and nothing else of its own: enough to generate, to export and to begin a run from."""
    length = min(model.max_position_embeddings, 4096)
    return build_run_spec(
        {
            "model": asdict(model),
            "batch": {"sequence_length": length, "global_batch_size": 1},
            "train": {"steps": 1},
            "data": {"mock": True},
        }
    )


def tokenizer_text(folder: HuggingFaceFolder) -> str | None:
    """The folder's tokenizer as a tokenizer.json, None where it has none; raises CheckpointError when it is damaged."""
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        path = folder.directory / name
        if path.is_file():
            try:
                return load_tokenizer(path).to_json()
            except DataError as error:
                raise CheckpointError(f"the tokenizer of {folder.directory} cannot be read: {error}") from error
    return None


def _text(path: Path, text: str) -> FileRecord:
    return _copied(path, text.encode())


def _copied(path: Path, content: bytes) -> FileRecord:
    with HashedFile(path) as file:
        file.write(content)
    return file.record
