"""Load pretrained weights into a run's parameters under any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.coordination import run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder, is_huggingface, other_format
from megalaunch.engine.dtensor import copy_from_global_
from megalaunch.engine.model.decoder import VOCAB_PARALLEL_PARAMS
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.importers.huggingface.registry import differences
from megalaunch.rundir.checkpoint.contents import ORIGIN, ORIGIN_FILE
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.checkpoint.manifest import MANIFEST, verify_checkpoint
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.model import ModelSpec


def load_pretrained(source: Path, model: ModelSpec, parts: ModelParts) -> None:
    """Fill this rank's parameters from a Hugging Face folder, a checkpoint or a run directory. Collective.

    Rows beyond the source's vocabulary are filled with zeros. Raises the same CheckpointError on every rank, with every
    difference between the run's model and the source's.
    """
    run_on_all_ranks(lambda: _load(source, model, parts))


def save_source_files(source: Path, directory: RunDirectory, num_tokens: int) -> None:
    """Copy the files that came with the source's weights into the run directory. Collective.

    Every checkpoint of the run includes them: the tokenizer's files and the like, and the true vocabulary size (the
    larger of the source's and `num_tokens`, the token count of the run's tokenizer). Raises the same CheckpointError on
    all ranks.
    """

    def keep() -> None:
        weights = _open(source)
        document = {**weights.origin, "vocab_size": max(weights.model.vocab_size or 0, num_tokens)}
        target = directory.origin
        make_directory(target)
        for name, path in weights.companions().items():
            write_file_atomically(target / (ORIGIN_FILE + name), path.read_bytes())
        write_file_atomically(target / f"{ORIGIN}.json", json.dumps(document, indent=1) + "\n")

    run_on_rank0(keep)


def _load(source: Path, model: ModelSpec, parts: ModelParts) -> None:
    weights = _open(source)
    _require_same(source, model, weights.model)
    wanted: dict[str, Tensor] = {**dict(parts.named_parameters()), **dict(parts.named_buffers())}
    for name, value in _iter_weights(weights, wanted):
        copy_from_global_(wanted[name], _pad_vocab(name, value, wanted[name].shape))


def _open(source: Path) -> HuggingFaceWeights | StoredWeights:
    """Open the source by its kind. Raises CheckpointError if it is none of the three, or damaged."""
    other = other_format(source)
    if other is not None:
        raise CheckpointError(f"checkpoint.load_pretrained: {other}")
    if is_huggingface(source):
        return HuggingFaceWeights(HuggingFaceFolder(source))
    if (source / MANIFEST).exists():
        require_valid(source)
        return StoredWeights(source)
    found = _newest(RunDirectory(source).checkpoints)
    if found is None:
        raise CheckpointError(
            f"checkpoint.load_pretrained: {source} is not a Hugging Face folder (config.json), a checkpoint or a run "
            "with a valid checkpoint"
        )
    return StoredWeights(found)


def require_valid(checkpoint: Path) -> None:
    """Raise CheckpointError that lists the problems of a damaged checkpoint."""
    problems = verify_checkpoint(checkpoint)
    if problems:
        raise CheckpointError(f"the checkpoint {checkpoint} is damaged: {'; '.join(problems)}")


def _newest(checkpoints: Path) -> Path | None:
    """Return the newest valid checkpoint, without a collective: another rank may already have failed."""
    return next((path for path in checkpoints_by_step(checkpoints).values() if not verify_checkpoint(path)), None)


def _iter_weights(
    weights: HuggingFaceWeights | StoredWeights, wanted: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted parameters; each stored tensor is read once."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.iter_mapped(wanted.keys())
    return ((name, weights.read(name)) for name in wanted)


def _require_same(source: Path, model: ModelSpec, there: ModelSpec) -> None:
    """Raise CheckpointError that lists the differences between two models; a larger vocabulary is allowed."""
    own, its = model.vocab_size or 0, there.vocab_size or 0
    found = differences(replace(model, vocab_size=its, family=there.family), there)
    if own < its:
        found.append(f"model.vocab_size={own} (must be at least {its})")
    if found:
        raise CheckpointError(f"{source} has another model than the run:\n  " + "\n  ".join(found))


def _pad_vocab(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    if name not in VOCAB_PARALLEL_PARAMS or value.shape == shape:
        return value
    padded = torch.zeros(shape, dtype=value.dtype)
    padded[: value.shape[0]] = value
    return padded
