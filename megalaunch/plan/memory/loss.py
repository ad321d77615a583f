"""Bytes of head and loss on one device: logits of all tokens, or of one chunk together with gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.plan.memory.layer_dims import dtype_bytes
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.topology import Topology


@dataclass(frozen=True)
class LossBytes:
    """Bytes of one loss.

    Attributes:
        logits: at their peak.
        logits_waiting: of each other microbatch of a pipeline whose loss is computed.
        beside: allocated at the same time as the logits, such as finished gradients.
        scaled: while the finished gradients are scaled, after the logits are freed.
        formed_waiting: finished gradients of each other microbatch.
    """

    logits: float
    logits_waiting: float = 0.0
    beside: float = 0.0
    scaled: float = 0.0
    formed_waiting: float = 0.0


def loss_bytes(spec: RunSpec, topology: Topology, accounting: MemoryProfile, tokens: float) -> LossBytes:
    """Return the bytes of the loss of a microbatch with `tokens` tokens on a rank."""
    narrow = dtype_bytes(spec.precision.compute_dtype)
    vocabulary = vocabulary_rows(spec.model.vocab_size or 0, topology.tp) / topology.tp
    hidden = narrow * spec.model.hidden_size
    formed = hidden * (tokens + vocabulary)  # the head's two gradients
    gathered = hidden * tokens if spec.parallel.sequence_parallel else 0.0
    if (
        spec.train.loss_chunks > 1
    ):  # engine/train/linear_cross_entropy.py: a chunk's logits stay allocated while its loss is computed
        chunk = -(-tokens // spec.train.loss_chunks)
        logits = (accounting.logit_bytes + narrow) * vocabulary * chunk
        return LossBytes(logits, beside=formed + gathered, scaled=2 * formed, formed_waiting=formed)
    if accounting.loss_in_place:
        copied = narrow if narrow < 4 else 0
        logits = (accounting.logit_bytes + copied) * vocabulary * tokens
        return LossBytes(logits, logits if topology.pp > 1 else 0.0, beside=formed + gathered)
    own, waits = _kept_by_a_stage(topology, accounting, narrow)
    return LossBytes((accounting.logit_bytes + own) * vocabulary * tokens, waits * vocabulary * tokens)


def _kept_by_a_stage(topology: Topology, accounting: MemoryProfile, narrow: int) -> tuple[float, float]:
    """Return the bytes per logit that a pipeline holds, of the microbatch in backward and of each waiting one."""
    if topology.pp == 1 or accounting.waiting_logits is None:
        return 0.0, 0.0
    return float(narrow), accounting.waiting_logits + narrow
