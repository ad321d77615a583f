"""Whose buffers are counted: our engine's, or Megatron-LM's as an outside check. A few named constants each.

Bytes are a parameter's, unless said otherwise. `fp32`-wide values follow the precision section where it says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.config.schema import RunSpec
from megalaunch.platform.chips import CHIPS


@dataclass(frozen=True)
class MemoryProfile:
    """What a training stack keeps on a device while it steps.

    `sharded_master`: the fp32 weights are what is sharded, and copies in the compute format are gathered from them
    (FSDP2); else the compute weights stand whole beside a sharded fp32 master (Megatron's distributed optimizer).
    `logit_bytes`: peak bytes a logit while the loss runs backwards.
    `waiting_logits`: bytes a logit of each microbatch of a pipeline whose loss has run and waits for that, the
    logits themselves, which the stage keeps, left out; None where nothing of them is kept.
    `gathers_again`: with sequence parallelism the gathered input of a matmul is not kept but gathered once more.
    `float8_inputs`: fp8 matmuls keep their inputs in 8 bits (Transformer Engine).
    `float8_weight_copies`: bytes a weight of the 8-bit copies that fp8 keeps beside compute weights.
    `unfused_attention`: attention's weights are kept, because no fused kernel runs.
    `activation_inputs`: what a gated activation keeps: gate and up (2), or silu(gate) as well (3).
    `activation_gradients`: how many gradients of its own size take room at once as it runs backwards.
    `kept_weights`: tokens up to which plain causal attention in fp32 keeps its weights, a triangle of blocks of
    `weight_rows` rows (queries of all heads of a group); 0: it does not.
    `parts_apart`: parts of sums of gradients that come from other ranks lie beside those that leave.
    `loss_in_place`: gradients take the place of the logits, so that most is held as the head runs backwards.
    `deferred_heads`: microbatches whose gradients of logits wait, so that the head's own gradient comes late.
    `plain_contexts`: attention over gathered keys, or within documents, keeps a mask in the format of queries.
    `stage_messages`: a pipeline's stage keeps its output of each microbatch in flight until that runs backwards, and
    holds one gradient that came and one that leaves.
    `ring_scores`: fp32 copies of scores that a ring of context-parallel ranks works on, where no kernel is fused.
    `scored_queries`: queries of a block where attention that no kernel computes works block by block; 0: it does not.
    `dropout_masks`: a mask is kept for each block's output, a byte a number; else a word a token, to draw it again.
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


# FSDP2 over fp32 master weights (engine/parallel/fsdp.py). The loss (engine/train/loss.py) holds, as it runs
# backwards, log-probabilities, their gradient and the logits' gradient, each in fp32; the 16-bit logits are gone.
# engine/model/attention/blockwise.py works on scores and on their gradients; engine/model/dropout.py draws masks twice.
# torch's stages keep what they have sent on.
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

# The same on a processor: no kernel is fused there, and new memory is what it waits for. kernels/swiglu.py keeps
# silu(gate), whose place its gradients take; engine/model/attention/cpu.py, engine/train/loss.py,
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
# vocabulary-parallel cross-entropy works in place on one fp32 copy, beside the 16-bit logits. Transformer Engine
# keeps 8-bit inputs, and beside bf16 weights an 8-bit copy and its transpose.
MEGATRON = MemoryProfile(
    "megatron",
    sharded_master=False,
    logit_bytes=6.0,
    float8_inputs=True,
    float8_weight_copies=2.0,
)


def profile_for(spec: RunSpec) -> MemoryProfile:
    """That of our engine on the chip of a spec."""
    chip = CHIPS.get(spec.platform.chip)
    return CPU_ENGINE if chip is not None and chip.device == "cpu" else ENGINE
