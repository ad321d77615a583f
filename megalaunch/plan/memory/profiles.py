"""Memory profiles of training stacks: this project's engine, and Megatron-LM as an external check.

Bytes are per parameter, unless said otherwise; widths of fp32 follow the precision section where it sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.platforms import TRITON_DEVICES
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class MemoryProfile:
    """The memory that a training stack allocates on a device during a step.

    Attributes:
        sharded_main_params: fp32 main parameters are sharded, and copies in the compute dtype are all-gathered from
            them (FSDP2); else full compute weights and sharded fp32 main parameters (Megatron's distributed optimizer).
        logit_bytes: peak bytes per logit during the backward of a loss that is not fused.
        pending_logit_bytes: bytes per logit of each microbatch of a pipeline whose loss, not fused, is computed and
            whose backward is pending, without the logits, which the stage saves; None: nothing is saved.
        regathers_inputs: with sequence parallelism a matmul's gathered input is not saved, backward all-gathers it.
        fp8_inputs: fp8 matmuls save their inputs in 8 bits (Transformer Engine).
        fp32_matmuls: matmuls convert 16-bit operands to fp32, and save them as they are (kernels/matmul.py).
        input_copies: of them, projections that share their input save a copy each if they are not fused: experts, and
            others without tensor parallelism.
        fp8_weight_copy_bytes: bytes per weight of the 8-bit copies that fp8 has in addition to compute weights, and
            that are not sharded over data-parallel ranks.
        unfused_attention: attention weights are saved, because no fused kernel runs.
        activation_inputs: inner values that a gated activation saves: gate and up (2), or silu(gate) too (3).
        plain_activation_inputs: inner values that activations save which no kernel fuses, by name.
        activation_gradients: gradients of that size that are allocated at once in its backward.
        input_gradient_buffers: tensors of all tokens that the backward of a column-parallel layer holds at once with
            sequence parallelism: its gathered input and the gradient of that, and parts of either as they are received
            or sent.
        max_saved_weight_tokens: sequence length up to which causal attention in fp32 on CPU saves its weights, a
            triangle of blocks of `weight_block_rows` rows (queries of all heads of a group); 0: never.
        separate_reduce_scatter_buffers: a reduce-scatter has separate buffers for received and sent shards.
        loss_in_place: gradients overwrite the logits, so the peak is in the backward of the head.
        fused_loss: kernels write the gradient of logits over them, in the compute dtype, without a copy in fp32.
        fused_update: kernels update weights and moments in half formats by AdamW and Lion without copies in fp32.
        deferred_head_microbatches: microbatches whose gradients of logits are saved to defer the head's gradient.
        dense_mask_tokens: attention over whole samples of up to so many tokens, with documents or a window, saves a
            mask in the dtype of queries; in longer samples blocks need none.
        repeats_masked_kv: attention with such a mask, and the memory-efficient kernel, save the keys and values of
            every query head (kernels/causal_attention.py).
        expands_grouped_gradients: flash attention's backward writes gradients of keys and values for every query head,
            and sums those of a group up.
        p2p_buffers: a pipeline stage holds its output of each microbatch in flight until that one's backward, and one
            received and one sent gradient.
        score_copies: fp32 copies of scores in attention without a fused kernel.
        query_block: queries per block of attention without a fused kernel; 0: not by blocks.
        dropout_masks: each block's output saves a mask, one byte per value; else 4 bytes per token to regenerate it.
    """

    name: str
    sharded_main_params: bool
    logit_bytes: float
    regathers_inputs: bool = True
    fp8_inputs: bool = False
    fp32_matmuls: bool = False
    input_copies: bool = False
    fp8_weight_copy_bytes: float = 0.0
    unfused_attention: bool = False
    activation_inputs: int = 2
    plain_activation_inputs: tuple[tuple[str, int], ...] = ()
    activation_gradients: int = 2
    input_gradient_buffers: int = 2
    max_saved_weight_tokens: int = 0
    weight_block_rows: int = 128
    separate_reduce_scatter_buffers: bool = False
    loss_in_place: bool = False
    fused_loss: bool = False
    fused_update: bool = False
    deferred_head_microbatches: int = 0
    pending_logit_bytes: float | None = None
    dense_mask_tokens: int = 0
    repeats_masked_kv: bool = False
    expands_grouped_gradients: bool = False
    score_copies: int = 0
    query_block: int = 0
    dropout_masks: bool = True
    p2p_buffers: bool = False


# FSDP2 over fp32 master weights (engine/parallel/fsdp.py). Kernels compute the loss (kernels/linear_loss.py). Widths of
# logits are those of a loss without kernels (engine/train/loss.py): its backward holds log-probabilities, their
# gradient and the logits' gradient, each in fp32; the 16-bit logits are freed.
# engine/model/attention/core.py allocates scores and their gradients; engine/model/dropout.py regenerates masks.
# torch's pipeline stages save the outputs that they have sent.
ENGINE = MemoryProfile(
    "engine",
    sharded_main_params=True,
    logit_bytes=12.0,
    pending_logit_bytes=4.0,
    fused_loss=True,
    fused_update=True,
    dense_mask_tokens=DENSE_MASK_TOKENS,
    repeats_masked_kv=True,
    expands_grouped_gradients=True,
    score_copies=2,
    query_block=512,
    dropout_masks=False,
    p2p_buffers=True,
    input_gradient_buffers=3,
    plain_activation_inputs=(("quick_gelu", 2),),
)

# The same on a device without Triton: gated activations and the loss run operator by operator.
ENGINE_WITHOUT_TRITON = replace(
    ENGINE,
    name="engine without Triton",
    fused_loss=False,
    fused_update=False,
    activation_inputs=3,
    plain_activation_inputs=(("quick_geglu", 4), ("quick_gelu", 2)),
)

# The same on a CPU without instructions for bf16: it has no fused kernels, and allocating memory is slow.
# kernels/swiglu.py saves silu(gate), which its gradients overwrite; see also kernels/causal_attention.py,
# engine/train/loss.py, engine/parallel/fsdp.py.
CPU_ENGINE = replace(
    ENGINE_WITHOUT_TRITON,
    name="engine on CPU",
    fp32_matmuls=True,
    repeats_masked_kv=False,
    expands_grouped_gradients=False,
    activation_gradients=1,
    input_gradient_buffers=4,  # reduce-scatter is an all-to-all
    max_saved_weight_tokens=512,
    separate_reduce_scatter_buffers=True,
    logit_bytes=4.0,
    loss_in_place=True,
)

# Megatron-LM: 2 (weights) + 4 (main gradients) + 12 / (dp cp) bytes a parameter (report_theoretical_memory). Its
# vocab-parallel cross-entropy works in place on one fp32 copy, next to the 16-bit logits. Transformer Engine
# saves 8-bit inputs, and holds bf16 weights, an 8-bit copy and its transpose.
MEGATRON = MemoryProfile(
    "megatron",
    sharded_main_params=False,
    logit_bytes=6.0,
    fp8_inputs=True,
    fp8_weight_copy_bytes=2.0,
)


# Layers by Transformer Engine: it saves 8-bit inputs, and holds an 8-bit copy of each weight and its transpose
# (engine/parallel/transformer_engine.py).
TRANSFORMER_ENGINE = replace(
    ENGINE, name="engine with Transformer Engine", fp8_inputs=True, input_copies=True, fp8_weight_copy_bytes=2.0
)


def profile_for(spec: RunSpec) -> MemoryProfile:
    """Return the profile of this project's engine on the spec's chip."""
    chip = CHIPS.get(spec.platform.chip)
    if spec.precision.uses_transformer_engine:
        return TRANSFORMER_ENGINE
    if chip is None or chip.device in TRITON_DEVICES:
        return ENGINE
    return CPU_ENGINE if chip.device == "cpu" else ENGINE_WITHOUT_TRITON
