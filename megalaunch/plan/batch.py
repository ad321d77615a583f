"""Batch math: how one step's samples are divided over ranks and microbatches."""

from __future__ import annotations

from megalaunch.config.schema import RunSpec


def own_share(global_batch_size: int, dp: int) -> int | None:
    """Samples of one data-parallel rank a step, or None when the batch does not divide."""
    share, rest = divmod(global_batch_size, dp)
    return None if rest else share


def tokens_per_step(spec: RunSpec) -> int:
    """Tokens of one optimizer step, over all devices."""
    return spec.batch.global_batch_size * spec.batch.sequence_length


def samples_requested(spec: RunSpec) -> int:
    """Training samples of the whole run: train.steps * batch.global_batch_size."""
    return spec.train.steps * spec.batch.global_batch_size
