"""The samples that a run spec with prepared data asks for: what the engine opens."""

from __future__ import annotations

from pathlib import Path

from megalaunch.config.schema.data import DataSpec
from megalaunch.data.errors import DataError
from megalaunch.data.gpt_samples import GPTSamples
from megalaunch.data.indexed import IndexedTokens
from megalaunch.data.split import training_and_validation
from megalaunch.data.validation_samples import ValidationSamples


def open_training(data: DataSpec, sequence_length: int, seed: int, vocab_size: int) -> GPTSamples:
    """The training samples; `data.train_prefix` and `data.num_samples` must be set. Raises DataError."""
    training, _ = _parts(data)
    return GPTSamples(_train_prefix(data), sequence_length, data.num_samples, seed, training, vocab_size)


def open_validation(data: DataSpec, sequence_length: int, vocab_size: int) -> ValidationSamples | None:
    """The validation samples, or None when the run has none. Raises DataError."""
    if data.validation_prefix is None:
        return None
    shared = data.validation_prefix == data.train_prefix
    sequences = _parts(data)[1] if shared else None
    samples = ValidationSamples(Path(data.validation_prefix), sequence_length, sequences, vocab_size)
    return samples if len(samples) else None


def _parts(data: DataSpec) -> tuple[range, range]:
    prefix = _train_prefix(data)
    validation = None if data.validation_prefix is None else Path(data.validation_prefix)
    return training_and_validation(prefix, validation, IndexedTokens(prefix).num_sequences)


def _train_prefix(data: DataSpec) -> Path:
    if data.train_prefix is None:
        raise DataError("the data is not prepared", fix="Start the run through `megalaunch train`, which prepares it.")
    return Path(data.train_prefix)
