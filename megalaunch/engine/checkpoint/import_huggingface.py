"""Import a Hugging Face folder as a checkpoint, one tensor at a time, in the stored dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.atomic_directory import Wrote, require_new
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.import_checkpoint import write_imported_checkpoint

Prove = Callable[[HuggingFaceWeights, Path], dict[str, Any]]
"""Compares the folder with the written checkpoint; raises CheckpointError if they differ, else returns the report."""


def import_folder(directory: Path, output: Path, prove: Prove, wrote: Wrote) -> HuggingFaceWeights:
    """Write and verify the checkpoint `output`. Raises CheckpointError and then leaves nothing behind."""
    require_new(output)
    folder = HuggingFaceFolder(directory)
    weights = HuggingFaceWeights(folder)
    write_imported_checkpoint(
        weights, tokenizer_text(folder), output, lambda unfinished: prove(weights, unfinished), wrote
    )
    return weights


def tokenizer_text(folder: HuggingFaceFolder) -> str | None:
    """Return the folder's tokenizer as the text of a tokenizer.json, or None. Raises CheckpointError if damaged."""
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        path = folder.directory / name
        if path.is_file():
            try:
                return load_tokenizer(path).to_json()
            except DataError as error:
                raise CheckpointError(f"the tokenizer of {folder.directory} cannot be read: {error}") from error
    return None
