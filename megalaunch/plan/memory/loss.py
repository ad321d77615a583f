"""Bytes of head and loss on one device: logits of all tokens, or of one chunk together with gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.plan.memory.dtypes_and_groups import dtype_bytes
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

SUM_ROWS = 16384
"""Rows of the head whose gradient is summed over chunks at once (engine/train/loss.py)."""
_SUM_BYTES = 4
"""Bytes per parameter of that sum."""


@dataclass(frozen=True)
class LossBytes:
    """Bytes of one loss.

    Attributes:
        logits: peak bytes of logits.
        depth_logits: logits of each MTP depth, whose loss is computed before.
        pending_logits: logits of each other microbatch of a pipeline whose loss is computed.
        stage_output: logits that a pipeline's last stage returns, which torch's runtime keeps until their backward pass
            ends, and its schedule until the next output.
        with_logits: allocated at the same time as the logits, such as gradients of the head.
        buffers: allocated with them for the current loss. In chunks: its gathered input, the fp32 sum of the weight's
            gradient, and of a chunk's product what does not fit into the memory of freed logits. Whole: what a head
            that multiplies in fp32 converts.
        not_rounded: the gradient that it will be, which `with_logits` counts.
        while_scaling: while the head's gradients are scaled, after the logits are freed.
        pending_gradients: gradients of the head of each other microbatch.
    """

    logits: float
    depth_logits: float
    pending_logits: float = 0.0
    stage_output: float = 0.0
    with_logits: float = 0.0
    buffers: float = 0.0
    not_rounded: float = 0.0
    while_scaling: float = 0.0
    pending_gradients: float = 0.0


def loss_bytes(spec: RunSpec, topology: Topology, profile: MemoryProfile, tokens: float) -> LossBytes:
    """Return the bytes of the loss of a microbatch with `tokens` tokens on a rank."""
    compute_bytes = dtype_bytes(spec.precision.compute_dtype)
    vocab_rows = vocabulary_rows(spec.model.vocab_size or 0, topology.tp) / topology.tp
    hidden_bytes = compute_bytes * spec.model.hidden_size
    head_gradients = hidden_bytes * (tokens + vocab_rows)  # the head's two gradients
    gathered = hidden_bytes * tokens if spec.parallel.sequence_parallel else 0.0
    # Tensor parallelism sums the input's gradient up over ranks, and sequence parallelism gathers the input meanwhile.
    whole = profile.input_gradient_buffers if spec.parallel.sequence_parallel else 2
    in_head = max(head_gradients + gathered, whole * hidden_bytes * tokens if topology.tp > 1 else 0.0)
    capped = _softcap_bytes(spec, profile, compute_bytes)
    chunks = count_loss_chunks(spec)
    if chunks > 1:  # engine/train/loss.py: the logits of one chunk at a time
        chunk_logits = vocab_rows * -(-tokens // chunks)
        unfused = 0.0 if profile.fused_loss else profile.logit_bytes + capped
        freed = unfused * chunk_logits  # before the chunk's product is added to the sum
        product = hidden_bytes * min(vocab_rows, SUM_ROWS) if compute_bytes < _SUM_BYTES else 0.0
        return LossBytes(
            freed + compute_bytes * chunk_logits,
            depth_logits=0.0,
            with_logits=head_gradients,
            buffers=gathered + _SUM_BYTES * spec.model.hidden_size * vocab_rows + max(product - freed, 0.0),
            not_rounded=hidden_bytes * vocab_rows,
            while_scaling=2 * head_gradients,
            pending_gradients=head_gradients,
        )
    if profile.fused_loss:
        return _fused_loss_bytes(spec, topology, compute_bytes * vocab_rows * tokens, in_head)
    if profile.loss_in_place:
        cast = compute_bytes if compute_bytes < 4 else 0
        logits = (profile.logit_bytes + cast + capped) * vocab_rows * tokens
        held = (profile.logit_bytes + capped) * vocab_rows * tokens
        # A head that multiplies in fp32 (kernels/matmul.py) converts its weight, and its input's gradient is in fp32.
        converted = 2 * head_gradients if profile.fp32_matmuls and cast else 0.0
        # A last stage without MTP returns its logits and saves them, in the compute dtype; else the loss makes them.
        saved = held if spec.model.mtp.num_layers else logits
        pending = saved if topology.pp > 1 else 0.0
        return LossBytes(logits, held, pending, with_logits=in_head, buffers=converted)
    own, pending = _pipeline_bytes_per_logit(topology, profile, compute_bytes)
    held = (profile.pending_logit_bytes or profile.logit_bytes) + capped
    pending += capped if pending else 0.0
    width = vocab_rows * tokens
    return LossBytes((profile.logit_bytes + own + capped) * width, held * width, pending * width)


def _fused_loss_bytes(spec: RunSpec, topology: Topology, logits: float, in_head: float) -> LossBytes:
    """Return the bytes of whole logits whose gradient takes their place, given those of the backward of the head.

    Without a cap the peak is in the backward of the head. That of a cap holds tanh, which is saved, the gradient of
    cap * tanh and that of the logits; in a pipeline also the stage's output, in whose place the first gradient was.
    """
    depths = spec.model.mtp.num_layers
    returned = logits if topology.pp > 1 and not depths else 0.0
    pending = logits if topology.pp > 1 else 0.0
    held = LossBytes(logits, logits, pending, returned)
    if spec.model.final_logit_softcapping is not None:
        held = LossBytes(3 * logits + returned, 2 * logits, 2 * pending, returned)
        in_head = max(in_head - 2 * logits, 0.0)
    if topology.tp > 1:  # the head is an operator with collectives of its own
        return replace(held, buffers=(1 + depths) * in_head)
    return replace(held, with_logits=in_head)


def _softcap_bytes(spec: RunSpec, profile: MemoryProfile, compute_bytes: int) -> float:
    """Return the bytes per logit of cap * tanh(x / cap): tanh saves its output.

    A loss that works in place on its input is smaller than this forward pass, which holds x / cap, too.
    """
    if spec.model.final_logit_softcapping is None:
        return 0.0
    return float(compute_bytes * (2 if profile.loss_in_place else 1))


def _pipeline_bytes_per_logit(topology: Topology, profile: MemoryProfile, compute_bytes: int) -> tuple[float, float]:
    """Return the bytes per logit in a pipeline: of the microbatch in backward, and of each pending microbatch."""
    if topology.pp == 1 or profile.pending_logit_bytes is None:
        return 0.0, 0.0
    return float(compute_bytes), profile.pending_logit_bytes + compute_bytes
