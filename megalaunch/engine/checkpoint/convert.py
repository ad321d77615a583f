"""Convert checkpoints: from Hugging Face and Megatron, to Hugging Face, and to experts, each numerically verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalaunch.engine.checkpoint.atomic_directory import Wrote, require_new
from megalaunch.engine.checkpoint.export_huggingface import Export, StoredWeights, export_folder
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.import_checkpoint import write_imported_checkpoint
from megalaunch.engine.checkpoint.import_huggingface import import_folder
from megalaunch.engine.checkpoint.load_tensors import checkpoint_reader
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.checkpoint.megatron_weights import MegatronWeights
from megalaunch.engine.checkpoint.retention import find_checkpoint
from megalaunch.engine.checkpoint.upcycle import UpcycledWeights, Upcycling
from megalaunch.engine.checkpoint.verify_conversion import verify_equal_models, verify_logits
from megalaunch.rundir.checkpoint.contents import TOKENIZER_FILE
from megalaunch.schema.model import ModelSpec

# Upper bounds of the logit error from rounding weights to a dtype, relative to the largest logit. Measured errors are
# well below them.
_COARSE = {torch.bfloat16: 0.1, torch.float16: 0.02}


def _no_progress(done: int, total: int) -> None:
    """Ignore progress: the default callback."""


def import_huggingface(folder: Path | str, checkpoint: Path | str, wrote: Wrote = _no_progress) -> dict[str, Any]:
    """Convert a Hugging Face folder to a checkpoint and verify it.

    Args:
        folder: the source, with config.json and safetensors files.
        checkpoint: the directory to create.
        wrote: progress callback in bytes, called while the tensors are written (before verification).

    Returns:
        The verification report, also saved in the checkpoint as proof.json.

    Raises:
        CheckpointError: lists everything that prevents an exact conversion; nothing is written then.
    """
    folder, checkpoint = Path(folder), Path(checkpoint)
    reports: list[dict[str, Any]] = []

    def compare(weights: HuggingFaceWeights, written: Path) -> dict[str, Any]:
        reports.append(
            verify_logits(weights.model, folder, weights.read, checkpoint_reader(written)) | {"notes": weights.notes}
        )
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
    """Convert a Megatron-LM torch_dist checkpoint and verify it.

    Args:
        source: the opened Megatron checkpoint.
        model: the model that its saved arguments describe.
        checkpoint: the directory to create.
        vocabulary: the true vocabulary size, without Megatron's padding rows; None keeps every row.
        wrote: progress callback in bytes.

    Returns:
        The verification report, also saved in the checkpoint as proof.json.

    Raises:
        CheckpointError: lists everything that prevents an exact conversion; nothing is written then.
    """
    require_new(checkpoint)
    weights = MegatronWeights(source, model, vocabulary)
    reports: list[dict[str, Any]] = []

    def compare(written: Path) -> dict[str, Any]:
        reports.append(verify_logits(weights.model, None, weights.read, checkpoint_reader(written)))
        return reports[-1]

    write_imported_checkpoint(weights, None, checkpoint, compare, wrote)
    return reports[-1]


def export_huggingface(
    source: Path | str,
    folder: Path | str,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    report: Callable[[str], None] = lambda message: None,
    wrote: Wrote = _no_progress,
) -> dict[str, Any]:
    """Convert a checkpoint to a Hugging Face folder and verify it.

    Args:
        source: a checkpoint, or a run directory whose newest valid checkpoint is exported.
        folder: the directory to create.
        dtype: dtype of the exported tensors; None keeps the stored one.
        max_shard_bytes: largest size of one safetensors file.
        report: called with a message for every invalid checkpoint that is skipped.
        wrote: progress callback in bytes.

    Returns:
        The verification report.

    Raises:
        CheckpointError: as `import_huggingface` and `find_checkpoint`.
    """
    source, folder = Path(source), Path(folder)

    def compare(weights: StoredWeights, written: Path) -> dict[str, Any]:
        again = HuggingFaceWeights(HuggingFaceFolder(written))
        coarse = _COARSE.get(dtype, 0.0) if dtype is not None else 0.0
        return verify_logits(weights.model, written, again.read, weights.read, coarse)

    weights = StoredWeights(find_checkpoint(source, report))
    return export_folder(weights, Export(folder, dtype, max_shard_bytes), compare, wrote)


def upcycle(
    source: Path,
    asked: Upcycling,
    checkpoint: Path,
    report: Callable[[str], None] = lambda message: None,
    wrote: Wrote = _no_progress,
) -> dict[str, Any]:
    """Convert a dense checkpoint to a mixture of experts with the same logits, and verify it.

    Args:
        source: a checkpoint, or a run directory whose newest valid checkpoint is read.
        asked: the experts to make.
        checkpoint: the directory to create.
        report: called with a message for every invalid checkpoint that is skipped.
        wrote: progress callback in bytes.

    Returns:
        The verification report, also saved in the checkpoint as proof.json.

    Raises:
        ValueError: lists every reason why there is no such mixture.
        CheckpointError: as `import_huggingface` and `find_checkpoint`.
    """
    require_new(checkpoint)
    dense = StoredWeights(find_checkpoint(source, report))
    weights = UpcycledWeights(dense, asked)
    reports: list[dict[str, Any]] = []

    def compare(written: Path) -> dict[str, Any]:
        read = checkpoint_reader(written)
        reports.append(verify_equal_models(dense.model, dense.read, weights.model, read))
        return reports[-1]

    tokenizer = dense.checkpoint / TOKENIZER_FILE
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    write_imported_checkpoint(weights, text, checkpoint, compare, wrote)
    return reports[-1]
