"""A Hugging Face folder becomes a checkpoint of ours, tensor by tensor, in the format that they are stored in."""

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
"""Compares the folder with what was written; raises CheckpointError where they differ, else gives the report."""


def import_folder(directory: Path, output: Path, prove: Prove, wrote: Wrote) -> HuggingFaceWeights:
    """Write the checkpoint `output` and its proof; raises CheckpointError, and then nothing is left behind."""
    require_new(output)
    folder = HuggingFaceFolder(directory)
    weights = HuggingFaceWeights(folder)
    write_imported_checkpoint(
        weights, tokenizer_text(folder), output, lambda unfinished: prove(weights, unfinished), wrote
    )
    return weights


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
