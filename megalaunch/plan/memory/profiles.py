"""Memory profiles of training stacks: this project's engine, and Megatron-LM as an external check.

Bytes are per parameter, unless said otherwise; widths of fp32 follow the precision section where it sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.config.schema import RunSpec
from megalaunch.platform.chips import CHIPS


@dataclass(frozen=True)
class MemoryProfile:
    """The memory that a training stack holds on a device during a step.

    Attributes:
        sharded_master: fp32 weights are sharded, and copies in the compute dtype are gathered from them (FSDP2); else
            full compute weights and a sharded fp32 master (Megatron's distributed optimizer).
        logit_bytes: peak bytes per logit during the backward of the loss.
        waiting_logits: bytes per logit of each microbatch of a pipeline whose loss is computed and waits for backward,
            without the logits, which the stage holds; None: nothing is held.
        gathers_again: with sequence parallelism a matmul's gathered input is not saved but all-gathered again.
        float8_inputs: fp8 matmuls save their inputs in 8 bits (Transformer Engine).
        float8_weight_copies: bytes per weight of the 8-bit copies that fp8 holds in addition to compute weights.
        unfused_attention: attention weights are saved, because no fused kernel runs.
        activation_inputs: inner values that a gated activation saves: gate and up (2), or silu(gate) too (3).
        activation_gradients: gradients of that size that are alive at once in its backward.
        kept_weights: tokens up to which plain causal attention in fp32 saves its weights, a triangle of blocks of
            `weight_rows` rows (queries of all heads of a group); 0: never.
        parts_apart: a reduce-scatter has separate buffers for received and sent parts.
        loss_in_place: gradients overwrite the logits, so the peak is in the backward of the head.
        deferred_heads: microbatches whose gradients of logits are held for a deferred gradient of the head.
        plain_contexts: attention over gathered keys, or within documents, saves a mask in the dtype of queries.
        stage_messages: a pipeline stage holds its output of each microbatch in flight until that one's backward, and
            one received and one sent gradient.
        ring_scores: fp32 copies of scores in a ring of context-parallel ranks without a fused kernel.
        scored_queries: queries per block of attention without a fused kernel; 0: not by blocks.
        dropout_masks: each block's output saves a mask, one byte per value; else 4 bytes per token to regenerate it.
    """

    name: str
    sharded_master: bool
    logit_bytes: float
    gathers_again: bool = True
    float8_inputs: bool = False
    float8_weight_copies: float = 0.0
    unfused_attention: bool = False
    activation_inputs: int = 2
    activation_gradients: int = 2
    kept_weights: int = 0
    weight_rows: int = 128
    parts_apart: bool = False
    loss_in_place: bool = False
    deferred_heads: int = 0
    waiting_logits: float | None = None
    plain_contexts: bool = False
    ring_scores: int = 0
    scored_queries: int = 0
    dropout_masks: bool = True
    stage_messages: bool = False


# FSDP2 over fp32 master weights (engine/parallel/fsdp.py). The loss (engine/train/loss.py) holds, in its
# backward, log-probabilities, their gradient and the logits' gradient, each in fp32; the 16-bit logits are freed.
# engine/model/attention/blockwise.py holds scores and their gradients; engine/model/dropout.py regenerates masks.
# torch's pipeline stages hold the outputs that they have sent.
ENGINE = MemoryProfile(
    "engine",
    sharded_master=True,
    logit_bytes=12.0,
    waiting_logits=4.0,
    plain_contexts=True,
    ring_scores=2,
    scored_queries=512,
    dropout_masks=False,
    stage_messages=True,
)

# The same on a CPU: it has no fused kernels, and allocating memory is slow. kernels/swiglu.py saves
# silu(gate), which its gradients overwrite; see also kernels/causal_attention.py, engine/train/loss.py,
# engine/parallel/gloo_reduce_scatter.py.
CPU_ENGINE = replace(
    ENGINE,
    name="engine on processors",
    activation_inputs=3,
    activation_gradients=1,
    kept_weights=512,
    parts_apart=True,
    logit_bytes=4.0,
    loss_in_place=True,
)

# Megatron-LM: 2 (weights) + 4 (main gradients) + 12 / (dp cp) bytes a parameter (report_theoretical_memory). Its
# vocab-parallel cross-entropy works in place on one fp32 copy, next to the 16-bit logits. Transformer Engine
# saves 8-bit inputs, and holds bf16 weights, an 8-bit copy and its transpose.
MEGATRON = MemoryProfile(
    "megatron",
    sharded_master=False,
    logit_bytes=6.0,
    float8_inputs=True,
    float8_weight_copies=2.0,
)


def profile_for(spec: RunSpec) -> MemoryProfile:
    """Return the profile of this project's engine on the spec's chip."""
    chip = CHIPS.get(spec.platform.chip)
    return CPU_ENGINE if chip is not None and chip.device == "cpu" else ENGINE
