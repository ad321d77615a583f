"""Names of the files in a directory of prepared data."""

from __future__ import annotations

from pathlib import Path

TOKENIZER, TRAIN, VALIDATION = "tokenizer.json", "train", "validation"
"""The tokenizer, and the prefixes of the training and the validation tokens."""


def loss_mask_prefix(prefix: Path) -> Path:
    """Return the prefix of the loss mask files of `prefix`: 1 for each token of an answer, else 0."""
    return prefix.with_name(prefix.name + "_answers")
