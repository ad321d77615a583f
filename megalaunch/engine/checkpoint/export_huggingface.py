"""A checkpoint of ours becomes a Hugging Face folder, tensor by tensor, in shards of a size to choose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.config.schema.model import ModelSpec
from megalaunch.config.spec_file import read_spec
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.atomic_directory import Wrote, atomic_directory, count_bytes, require_new
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import COMPANIONS
from megalaunch.engine.checkpoint.load_tensors import full_tensor
from megalaunch.engine.checkpoint.mapped_weights import parameter_shapes
from megalaunch.engine.checkpoint.safetensors_file import DTYPES, TensorSource, write_file
from megalaunch.engine.families.weight_mapping import WeightMapping
from megalaunch.engine.families.weights import get_family_weights
from megalaunch.engine.model.decoder import DIVIDED_BY_VOCABULARY
from megalaunch.importers.huggingface.folder import CONFIG, INDEX, WEIGHTS_FILE
from megalaunch.importers.huggingface.registry import FamilyError, decoder_config, to_hf_config
from megalaunch.rundir.checkpoint.documents import read_document
from megalaunch.rundir.checkpoint.names import ORIGIN, ORIGIN_FILE, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index

Prove = Callable[["StoredWeights", Path], dict[str, Any]]


class StoredWeights:
    """The decoder's parameters in a verified checkpoint, without the rows that only fill up the vocabulary."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._catalogue = read_tensor_index(checkpoint)
        self.origin = self._origin()
        spec = read_spec(checkpoint / SPEC_FILE)
        vocabulary = min(self.origin.get("vocab_size") or spec.model.vocab_size or 0, spec.model.vocab_size or 0)
        self.model: ModelSpec = replace(spec.model, vocab_size=vocabulary)
        self.shapes = parameter_shapes(self.model)
        missing = [name for name in self.shapes if WEIGHTS + name not in self._catalogue]
        if missing:
            raise CheckpointError(f"the checkpoint {checkpoint} holds no {', '.join(missing)}")

    def read(self, name: str) -> Tensor:
        """One parameter, in the stored format."""
        whole = full_tensor(self.checkpoint, WEIGHTS + name, self._catalogue, {})
        return whole[: self.shapes[name][0]] if name in DIVIDED_BY_VOCABULARY else whole

    def dtype(self, name: str) -> torch.dtype:
        """Its stored format."""
        return DTYPES[self._catalogue[WEIGHTS + name].dtype]

    def companions(self) -> dict[str, Path]:
        """Files that came with the weights; at least the tokenizer."""
        inside = {name: self.checkpoint / (ORIGIN_FILE + name) for name in COMPANIONS}
        found = {name: path for name, path in inside.items() if path.is_file()}
        tokenizer = self.checkpoint / TOKENIZER_FILE
        if not found and tokenizer.is_file():
            found[TOKENIZER_FILE] = tokenizer
        return found

    def _origin(self) -> Mapping[str, Any]:
        if not (self.checkpoint / f"{ORIGIN}.json").is_file():
            return {}
        document = read_document(self.checkpoint, ORIGIN)
        known = document if isinstance(document, Mapping) else {"vocab_size": "unknown"}
        size, config = known.get("vocab_size"), known.get("config")
        if not (size is None or (type(size) is int and size > 0)) or not isinstance(config or {}, Mapping):
            raise CheckpointError(f"{self.checkpoint / ORIGIN}.json does not say where the weights came from")
        return known


@dataclass(frozen=True)
class Export:
    """What was asked for; `dtype` None: as stored."""

    output: Path
    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5_000_000_000


def export_folder(weights: StoredWeights, asked: Export, prove: Prove, wrote: Wrote) -> dict[str, Any]:
    """Write the folder; returns the proof's report. Raises CheckpointError, and then nothing is left behind."""
    require_new(asked.output)
    try:
        config = to_hf_config(weights.model)
        pairs = list(get_family_weights(weights.model).tensors(weights.model))
    except FamilyError as error:
        raise CheckpointError(f"{weights.checkpoint} cannot be exported:\n  " + "\n  ".join(error.problems)) from error
    _require_all_named(weights, pairs)
    sources = {name: source for pair in pairs for name, source in _sources(weights, pair, asked.dtype)}
    total = sum(source.size for source in sources.values())
    with atomic_directory(asked.output, total) as unfinished:
        _write_shards(unfinished, sources, asked.max_shard_bytes, count_bytes(total, wrote))
        dtype = next(iter(sources.values())).dtype
        config = {**_token_ids(weights, config), **config, "torch_dtype": str(dtype).removeprefix("torch.")}
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, path in weights.companions().items():
            (unfinished / name).write_bytes(path.read_bytes())
        return prove(weights, unfinished)


def _require_all_named(weights: StoredWeights, pairs: list[WeightMapping]) -> None:
    named = {name for pair in pairs for name in pair.ours}
    unnamed = [f"{name} has no name there" for name in weights.shapes if name not in named]
    unnamed += [f"the model has no {name}" for name in named if name not in weights.shapes]
    if unnamed:
        raise CheckpointError(f"{weights.checkpoint} cannot be exported:\n  " + "\n  ".join(sorted(unnamed)))


def _sources(
    weights: StoredWeights, pair: WeightMapping, dtype: torch.dtype | None
) -> Iterator[tuple[str, TensorSource]]:
    shapes, kind = pair.shapes_of_theirs(weights.shapes), dtype or weights.dtype(pair.ours[0])
    for index, name in enumerate(pair.theirs):

        def data(index: int = index) -> Tensor:
            made = pair.to_theirs([weights.read(own) for own in pair.ours])[index]
            return made.to(kind)

        yield name, TensorSource(kind, tuple(shapes[name]), data)


def _write_shards(
    unfinished: Path, sources: Mapping[str, TensorSource], limit: int, count: Callable[[int], None]
) -> None:
    shards: list[list[str]] = [[]]
    held = 0
    for name, source in sources.items():
        if shards[-1] and held + source.size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += source.size
    if len(shards) == 1:
        write_file(unfinished / WEIGHTS_FILE, sources, count)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(unfinished / file, {name: sources[name] for name in names}, count)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(s.size for s in sources.values())}, "weight_map": weight_map}
    (unfinished / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _token_ids(weights: StoredWeights, config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of special tokens: as the original file does, else as the tokenizer does.

    Nothing is left to transformers' defaults, which are those of the family's first model. The padding token's is
    always null: transformers gives its row of the embedding no gradient (nn.Embedding's padding_idx), and refuses an
    id beyond the vocabulary. What pads a batch stands in the tokenizer's files.
    """
    kept = decoder_config(weights.origin.get("config") or {})
    if kept.get("model_type") == config["model_type"]:
        found = {name: kept[name] for name in ("bos_token_id", "eos_token_id", "use_cache") if name in kept}
    else:
        found = {"bos_token_id": None, "eos_token_id": _end_of_text(weights.companions())}
    return {**found, "pad_token_id": None}


def _end_of_text(companions: Mapping[str, Path]) -> int | None:
    path = companions.get("tokenizer.json")
    try:
        return None if path is None else load_tokenizer(path).eod_id
    except DataError as error:
        raise CheckpointError(f"the tokenizer {path} cannot be read: {error}") from error
