"""Export a checkpoint to a Hugging Face folder, one tensor at a time, in shards of a chosen size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.atomic_directory import Wrote, atomic_directory, count_bytes, require_new
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import COMPANIONS
from megalaunch.engine.checkpoint.load_tensors import read_parameter
from megalaunch.engine.checkpoint.mapped_weights import parameter_shapes
from megalaunch.engine.checkpoint.safetensors_file import DTYPES, TensorSource, write_file
from megalaunch.engine.model.decoder import VOCAB_PARALLEL_PARAMS
from megalaunch.engine.weight_maps.weight_mapping import WeightMapping, holds_experts
from megalaunch.engine.weight_maps.weights import get_family_weights
from megalaunch.fs import UMASK_DIRECTORY_MODE, UMASK_FILE_MODE
from megalaunch.importers.huggingface.folder import CONFIG, INDEX, WEIGHTS_FILE
from megalaunch.importers.huggingface.registry import FamilyError, get_text_config, to_hf_config
from megalaunch.rundir.checkpoint.contents import ORIGIN, ORIGIN_FILE, SPEC_FILE, TOKENIZER_FILE, WEIGHTS, read_document
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.spec_file import read_spec

Prove = Callable[["StoredWeights", Path], dict[str, Any]]
_EXPERT_BIAS = ".router.expert_bias"  # keeps its dtype: it changes by small steps


class StoredWeights:
    """The decoder's parameters in a verified checkpoint, without the padding rows of the vocabulary."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._tensor_index = read_tensor_index(checkpoint)
        self.origin = self._origin()
        spec = read_spec(checkpoint / SPEC_FILE)
        vocabulary = min(self.origin.get("vocab_size") or spec.model.vocab_size or 0, spec.model.vocab_size or 0)
        self.model: ModelSpec = replace(spec.model, vocab_size=vocabulary)
        self.shapes = parameter_shapes(self.model)
        missing = [name for name in self.shapes if WEIGHTS + name not in self._tensor_index]
        if missing:
            raise CheckpointError(f"the checkpoint {checkpoint} has no {', '.join(missing)}")

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one parameter, or one row of its first dimension, in its stored dtype."""
        tensor = read_parameter(self.checkpoint, name, self._tensor_index, row)
        return tensor[: self.shapes[name][0]] if name in VOCAB_PARALLEL_PARAMS and row is None else tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a parameter."""
        return DTYPES[self._tensor_index[WEIGHTS + name].dtype]

    def companions(self) -> dict[str, Path]:
        """Return the files that came with the weights (tokenizer, generation config); at least the run's tokenizer."""
        inside = {name: self.checkpoint / (ORIGIN_FILE + name) for name in COMPANIONS}
        found = {name: path for name, path in inside.items() if path.is_file()}
        tokenizer = self.checkpoint / TOKENIZER_FILE
        if not found and tokenizer.is_file():
            found[TOKENIZER_FILE] = tokenizer
        return found

    def _origin(self) -> Mapping[str, Any]:
        """Return the document about the weights' origin (true vocabulary size, original config.json), validated."""
        if not (self.checkpoint / f"{ORIGIN}.json").is_file():
            return {}
        document = read_document(self.checkpoint, ORIGIN)
        known = document if isinstance(document, Mapping) else {"vocab_size": "unknown"}
        size, config = known.get("vocab_size"), known.get("config")
        if not (size is None or (type(size) is int and size > 0)) or not isinstance(config or {}, Mapping):
            raise CheckpointError(
                f"{self.checkpoint / ORIGIN}.json is damaged: vocab_size must be a positive integer, config a mapping"
            )
        return known


@dataclass(frozen=True)
class Export:
    """The options of an export. `dtype` None keeps the stored dtype."""

    output: Path
    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5_000_000_000


def export_folder(weights: StoredWeights, asked: Export, prove: Prove, wrote: Wrote) -> dict[str, Any]:
    """Write and verify a Hugging Face folder; return the verification report.

    Raises:
        CheckpointError: the model has no Hugging Face family, the verification failed or a write did. Nothing is left.
    """
    require_new(asked.output)
    try:
        config = to_hf_config(weights.model)
        family = get_family_weights(weights.model)
        pairs = list(family.tensors(weights.model))
    except FamilyError as error:
        raise CheckpointError(f"{weights.checkpoint} cannot be exported:\n  " + "\n  ".join(error.problems)) from error
    _require_all_named(weights, pairs)
    sources = {name: source for pair in pairs for name, source in _sources(weights, pair, asked.dtype)}
    sources |= {copy: sources[name] for copy, name in family.copies(weights.model).items()}
    total = sum(source.size for source in sources.values())
    with atomic_directory(asked.output, total, UMASK_DIRECTORY_MODE) as unfinished:
        _write_shards(unfinished, sources, asked.max_shard_bytes, count_bytes(total, wrote))
        dtype = next(iter(sources.values())).dtype
        config = {**_token_ids(weights, config), **config, "torch_dtype": str(dtype).removeprefix("torch.")}
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, path in weights.companions().items():
            (unfinished / name).write_bytes(path.read_bytes())
        return prove(weights, unfinished)


def _require_all_named(weights: StoredWeights, pairs: list[WeightMapping]) -> None:
    """Raise CheckpointError unless the family maps every parameter of the decoder, and no other."""
    named = {name for pair in pairs for name in pair.ours}
    unnamed = [f"{name} has no Hugging Face name" for name in weights.shapes if name not in named]
    unnamed += [f"the model has no {name}" for name in named if name not in weights.shapes]
    if unnamed:
        raise CheckpointError(f"{weights.checkpoint} cannot be exported:\n  " + "\n  ".join(sorted(unnamed)))


def _sources(
    weights: StoredWeights, pair: WeightMapping, dtype: torch.dtype | None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield the Hugging Face tensors of one mapping. Each is converted when it is written."""
    shapes, kind = pair.shapes_of_theirs(weights.shapes), weights.dtype(pair.ours[0])
    if dtype is not None and not pair.ours[0].endswith(_EXPERT_BIAS):
        kind = dtype
    for index, name in enumerate(pair.theirs):

        def data(index: int = index) -> Tensor | Iterator[Tensor]:
            if pair.stacked:
                return weights.read(pair.ours[0], index).to(kind)
            if holds_experts(pair.ours[0]):
                return (one[index].to(kind) for one in _each_expert(weights, pair))
            return pair.to_theirs([weights.read(own) for own in pair.ours])[index].to(kind)

        yield name, TensorSource(kind, tuple(shapes[name]), data)


def _each_expert(weights: StoredWeights, pair: WeightMapping) -> Iterator[list[Tensor]]:
    """Yield the foreign tensors of one expert after the other; [1, ...] each."""
    for expert in range(weights.shapes[pair.ours[0]][0]):
        yield list(pair.to_theirs([weights.read(own, expert).unsqueeze(0) for own in pair.ours]))


def _write_shards(
    unfinished: Path, sources: Mapping[str, TensorSource], limit: int, count: Callable[[int], None]
) -> None:
    """Write safetensors shards of at most `limit` bytes and their index; a single shard needs no index."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, source in sources.items():
        if shards[-1] and shard_bytes + source.size > limit:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += source.size
    if len(shards) == 1:
        write_file(unfinished / WEIGHTS_FILE, sources, count, UMASK_FILE_MODE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(unfinished / file, {name: sources[name] for name in names}, count, UMASK_FILE_MODE)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(s.size for s in sources.values())}, "weight_map": weight_map}
    (unfinished / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _token_ids(weights: StoredWeights, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special token ids of config.json: from the original file, else from the tokenizer.

    They are always written, because transformers' defaults are those of the family's first model. `pad_token_id` is
    always null: transformers gives the padding token's embedding row no gradient (nn.Embedding's padding_idx), and
    refuses an id beyond the vocabulary. The tokenizer's files define the padding token.
    """
    original = get_text_config(weights.origin.get("config") or {})
    if original.get("model_type") == config["model_type"]:
        found = {name: original[name] for name in ("bos_token_id", "eos_token_id", "use_cache") if name in original}
    else:
        found = {"bos_token_id": None, "eos_token_id": _end_of_text(weights.companions())}
    return {**found, "pad_token_id": None}


def _end_of_text(companions: Mapping[str, Path]) -> int | None:
    path = companions.get("tokenizer.json")
    try:
        return None if path is None else load_tokenizer(path).eod_id
    except DataError as error:
        raise CheckpointError(f"the tokenizer {path} cannot be read: {error}") from error
