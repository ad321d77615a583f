"""Count the chunks of head and loss (`train.loss_chunks`): as given, or as few as keep the logits of each small."""

from __future__ import annotations

from megalaunch.plan.memory.dtypes_and_groups import dtype_bytes
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.schema import RunSpec

LOGITS_LIMIT = 512 * 2**20
"""Bytes of a chunk's logits in the compute dtype: 2,093 tokens of 128,256 columns in bf16, enough for full matmuls."""


def microbatch_tokens(spec: RunSpec) -> int:
    """Return the tokens of a microbatch on one context-parallel rank, at least 1; one sample while its size is open."""
    return max(1, (spec.batch.micro_batch_size or 1) * spec.batch.sequence_length // spec.parallel.cp)


def count_loss_chunks(spec: RunSpec) -> int:
    """Return the chunks of a microbatch's tokens that head and loss process one after another.

    `train.loss_chunks`, or if it is null the fewest whose logits (tokens of a chunk x a rank's shard of the vocabulary)
    take at most `LOGITS_LIMIT` bytes; 1 while the vocabulary is open. The number depends on nothing but model,
    layout, batch and compute dtype: a run that resumes under the same layout adds up in the same order.
    """
    if spec.train.loss_chunks is not None:
        return spec.train.loss_chunks
    columns = vocabulary_rows(spec.model.vocab_size or 0, spec.parallel.tp) // spec.parallel.tp
    if columns == 0:
        return 1
    tokens_of_chunk = max(1, LOGITS_LIMIT // (columns * dtype_bytes(spec.precision.compute_dtype)))
    return -(-microbatch_tokens(spec) // tokens_of_chunk)
