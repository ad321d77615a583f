"""Hugging Face in and out and Megatron in, each with its proof: what the command `convert` and library users call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.checkpoint.atomic_directory import Wrote, require_new
from megalaunch.engine.checkpoint.export_huggingface import Export, StoredWeights, export_folder
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.import_checkpoint import write_imported_checkpoint
from megalaunch.engine.checkpoint.import_huggingface import import_folder
from megalaunch.engine.checkpoint.load_tensors import full_tensor
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.checkpoint.megatron_weights import MegatronWeights
from megalaunch.engine.checkpoint.streaming_forward import Read
from megalaunch.engine.checkpoint.verify_conversion import verify_logits
from megalaunch.engine.inference.load_model import find_checkpoint
from megalaunch.rundir.checkpoint.names import WEIGHTS
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index

# The largest error that rounding to a format makes of a logit, as a part of the largest one; measured generously.
_COARSE = {torch.bfloat16: 0.1, torch.float16: 0.02}


def _no_progress(done: int, total: int) -> None:
    """For who does not ask how far it is."""


def import_huggingface(folder: Path, checkpoint: Path, wrote: Wrote = _no_progress) -> dict[str, Any]:
    """A folder becomes a checkpoint; returns the proof's report, which is kept in it as proof.json.

    `wrote` hears how far it is, in bytes, before the proof. Raises CheckpointError that lists everything which keeps
    it from being exact; then nothing is written.
    """
    reports: list[dict[str, Any]] = []

    def compare(weights: HuggingFaceWeights, written: Path) -> dict[str, Any]:
        reports.append(verify_logits(weights.model, folder, weights.read, _reader(written)) | {"notes": weights.notes})
        return reports[-1]

    import_folder(folder, checkpoint, compare, wrote)
    return reports[-1]


def import_megatron(
    source: MegatronCheckpoint,
    model: ModelSpec,
    checkpoint: Path,
    vocabulary: int | None = None,
    wrote: Wrote = _no_progress,
) -> dict[str, Any]:
    """A Megatron checkpoint of the model that its arguments mean becomes one of ours; returns the proof's report.

    `vocabulary` is the true one, without what Megatron filled up. Raises CheckpointError that lists everything which
    keeps it from being exact; then nothing is written.
    """
    require_new(checkpoint)
    weights = MegatronWeights(source, model, vocabulary)
    reports: list[dict[str, Any]] = []

    def compare(written: Path) -> dict[str, Any]:
        reports.append(verify_logits(weights.model, None, weights.read, _reader(written)))
        return reports[-1]

    write_imported_checkpoint(weights, None, checkpoint, compare, wrote)
    return reports[-1]


def _reader(written: Path) -> Read:
    catalogue = read_tensor_index(written)

    def of_checkpoint(name: str) -> torch.Tensor:
        return full_tensor(written, WEIGHTS + name, catalogue, {})

    return of_checkpoint


def export_huggingface(
    source: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    report: Callable[[str], None] = lambda message: None,
    wrote: Wrote = _no_progress,
) -> dict[str, Any]:
    """A checkpoint, or the newest valid one of a run, becomes a folder; returns the proof's report.

    `dtype` None keeps the stored format; `report` hears of checkpoints that are passed over. Raises as
    `import_huggingface` and `find_checkpoint` do.
    """

    def compare(weights: StoredWeights, written: Path) -> dict[str, Any]:
        again = HuggingFaceWeights(HuggingFaceFolder(written))
        coarse = _COARSE.get(dtype, 0.0) if dtype is not None else 0.0
        return verify_logits(weights.model, written, again.read, weights.read, coarse)

    weights = StoredWeights(find_checkpoint(source, report))
    return export_folder(weights, Export(folder, dtype, max_shard_bytes), compare, wrote)
