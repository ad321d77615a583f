"""The memory model against steps of our engine itself: fake tensors, any rank of any world, GPUs or processors.

Shapes are small, but so large that what the model leaves out (counters, masks, indices) does not show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from made_specs import resolved
from slow_cases import covering, slow_but

from megalaunch.engine.simulate.deep_plan import deep_plan
from megalaunch.plan.memory.rank import (
    GRAD_REDUCE,
    LAST_LAYER,
    LATER_LAYER,
    LATER_LOSS,
    LAYER,
    LOSS,
    MICROBATCH_END,
    NEXT_LAYER,
    STEP_END,
    TIED,
    UPDATE,
    Memory,
    memory_by_rank,
)
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

CLOSE = 0.05
LLAMA = (
    "model=llama3_8b", "model.num_layers=3", "model.hidden_size=1024", "model.ffn_hidden_size=3584",
    "model.num_attention_heads=16", "model.num_query_groups=4", "model.head_dim=64", "model.vocab_size=16384",
)  # fmt: skip
GPT2 = ("model=gpt2_124m", "model.num_layers=3", "model.hidden_dropout=0", "model.attention_dropout=0")
DROPPING = (
    "model=gpt2_124m", "model.num_layers=3", "model.hidden_size=1536", "model.ffn_hidden_size=6144",
    "model.num_attention_heads=12", "model.num_query_groups=12", "model.head_dim=128", "model.vocab_size=1024",
    "model.hidden_dropout=0.1", "model.attention_dropout=0.1",
)  # fmt: skip
QWEN3 = ("model=qwen3_8b", *LLAMA[1:])
LATENT = (
    "model=deepseek_v2_lite", "model.num_layers=3", "model.moe.num_experts=null", *LLAMA[2:5], "model.vocab_size=16384",
    "model.num_query_groups=16", "model.mla.kv_lora_rank=256", "model.mla.q_lora_rank=384",
    "model.mla.qk_nope_head_dim=64", "model.mla.qk_rope_head_dim=32", "model.mla.v_head_dim=48",
)  # fmt: skip
RUN = ("train.steps=10", "cluster.nodes=1")
MANY_CHUNKS = ("model.num_layers=8",)  # torch's runtime gathers the weights of three virtual stages at once
FEW_WORDS = "model.vocab_size=1024"
CAPPED = "model.final_logit_softcapping=30"
SELECTIVE = "recompute=selective"
TWO_LEVELS = ("parallel.cp_comm_type=a2a+p2p", "parallel.hierarchical_context_parallel_sizes=[2,2]")
FLEX = "model.attention_backend=flex"
MATH = "model.attention_backend=math"
SINKS = "model.attention_sinks=true"
GATED = "model.attention_output_gate=true"
OFFLOADED = "optimizer.optimizer_offload_fraction"
MAIN_IN_BF16 = "precision.main_params_dtype=bf16"
ALL_KEYS = ("model.num_query_groups=16", "model.ffn_hidden_size=1024")
WIDE_LAYER = ("model.num_layers=1", "model.ffn_hidden_size=16384")
ONE_GROUP = ("model.num_query_groups=1", "model.ffn_hidden_size=1024")
NARROW = (FEW_WORDS, "model.ffn_hidden_size=1024")  # the peak is at the head, or at projections of the input
WINDOW = "model.sliding_window=512"
EMULATE = "precision.emulate=true"
PACKED = "data.reset_attention_mask=true"
MIXED = (WINDOW, "model.sliding_window_pattern=2")
DROPOUT = "model.attention_dropout=0.1"
SOFT_CAP = "model.attn_logit_softcapping=30"
NO_CALL = {"platform": "v100", "precision": "fp16"}  # no kernel of a whole mask: a dense one, or blocks


@dataclass(frozen=True)
class Case:
    """A layout on so many ranks, [global batch, micro batch, sequence], and when its `rank` should be fullest."""

    layout: str
    ranks: int
    batch: tuple[int, int, int]
    moment: str
    overrides: tuple[str, ...] = ()
    rank: int = 0
    shape: tuple[str, ...] = LLAMA
    platform: str = "h100"
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """For pytest."""
        where = (self.platform, self.precision, f"rank {self.rank}")
        return " ".join((self.shape[0], self.layout, "x".join(map(str, self.batch)), *self.overrides, *where))

    @property
    def spec(self) -> RunSpec:
        """The resolved spec."""
        total, micro, length = self.batch
        spec, _ = resolved(
            *self.shape,
            *RUN,
            f"platform={self.platform}",
            f"precision={self.precision}",
            f"parallel={self.layout}",
            f"cluster.devices_per_node={self.ranks}",
            f"batch.sequence_length={length}",
            f"batch.micro_batch_size={micro}",
            f"batch.global_batch_size={total}",
            *self.overrides,
        )
        return spec


ONE_LAYER = Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, "model.num_layers=1"))
FIRST_STAGE = (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=dualpipev", "recompute=full")
HSDP_MUON = Case("zero3hsdp2", 4, (4, 1, 256), STEP_END, ("optimizer=muon", "model.vocab_size=32768"))
LONG_MATH = Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH))
CASES = [
    Case("dp", 1, (1, 1, 256), STEP_END),
    Case("dp", 1, (1, 1, 256), STEP_END, ("optimizer=lion",)),
    Case("dp", 1, (1, 1, 256), STEP_END, ("optimizer=muon",)),
    Case("dp", 1, (8, 4, 2048), LOSS),
    Case("dp", 1, (4, 4, 2048), LOSS, precision="fp32"),
    Case("dp", 2, (8, 4, 2048), LOSS, (f"{OFFLOADED}=1",)),
    Case("zero1", 2, (8, 4, 2048), LOSS, (f"{OFFLOADED}=0.5",)),
    Case("zero0", 2, (8, 4, 2048), LOSS, ("parallel.outer_steps=1",)),
    Case("zero0cp2", 4, (8, 4, 2048), LOSS),  # states are sharded over cp
    Case("zero0", 2, (4, 2, 1024), NEXT_LAYER, ("parallel.outer_steps=5", "parallel.outer_momentum=0", FEW_WORDS)),
    Case("zero3hsdp2", 4, (8, 2, 1024), NEXT_LAYER, ("parallel.outer_steps=5", FEW_WORDS)),
    Case("zero3", 2, (4, 2, 1024), NEXT_LAYER, (FEW_WORDS, f"{OFFLOADED}=0.5")),
    Case("zero2", 2, (8, 2, 1024), LAYER, (FEW_WORDS, MAIN_IN_BF16, f"{OFFLOADED}=1")),
    Case("tp2pp2", 4, (8, 2, 2048), LOSS, ("model.num_layers=4", f"{OFFLOADED}=0.5"), 2),
    Case("zero2", 4, (16, 2, 2048), LAYER, (FEW_WORDS,), precision="fp16"),
    ONE_LAYER,
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.num_layers=1", "recompute=full")),
    Case("zero2", 2, (4, 1, 512), GRAD_REDUCE, WIDE_LAYER),  # whose weights are freed before, but not its last gradient
    Case("zero3", 2, (4, 1, 512), GRAD_REDUCE, WIDE_LAYER),
    HSDP_MUON,
    Case("zero2", 4, (8, 1, 256), MICROBATCH_END, ("precision.grad_dtype=bf16", "model.num_layers=1")),  # sent in fp32
    Case("zero3", 4, (4, 1, 256), STEP_END, ("precision.grad_dtype=bf16", "model.num_layers=1")),
    Case("zero1", 2, (4, 1, 1024), LAYER, WIDE_LAYER),  # weight gradients
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS,)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, SELECTIVE, "recompute.modules=[norm,activation]")),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, SELECTIVE, "recompute.modules=[norm,mlp]")),
    Case("dp", 1, (8, 4, 2048), NEXT_LAYER, (FEW_WORDS, "recompute=full")),
    Case("dp", 1, (8, 4, 2048), LOSS, ("model.mtp.num_layers=2",)),
    Case("pp2", 2, (6, 1, 2048), LOSS, ("parallel.num_layers_in_first_pipeline_stage=2", "model.mtp.num_layers=1"), 1),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.activation=geglu_tanh")),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.activation=quick_geglu", "model.swiglu_limit=7")),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS,), platform="mtt_s4000"),  # no Triton
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.activation=geglu_tanh"), platform="mtt_s4000"),
    Case("dp", 1, (8, 4, 2048), LOSS, (CAPPED,)),
    Case("tp4", 4, (4, 2, 2048), LOSS, (CAPPED, "train.loss_chunks=4")),
    Case("pp3", 3, (3, 1, 2048), LOSS, (CAPPED, "parallel.schedule=gpipe"), rank=2),
    Case("dp", 1, (8, 4, 1024), LOSS, shape=GPT2),  # LayerNorm, biases, learned positions, tied embeddings
    Case("dp", 1, (8, 4, 1024), LOSS, shape=QWEN3),  # norms of queries and keys
    Case("dp", 1, (8, 4, 1024), LOSS, ("model.qk_norm=full",)),
    Case("tp4sp", 4, (8, 4, 1024), LOSS, ("model.qk_norm=full",)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, GATED)),
    Case("dp", 1, (8, 4, 2048), LOSS, (*NARROW, GATED, SELECTIVE, "recompute.modules=[attention]")),
    Case("tp4sp", 4, (8, 4, 2048), LOSS, (FEW_WORDS, GATED)),
    Case("cp4", 4, (4, 2, 4096), LAYER, (*NARROW, GATED)),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, GATED, MATH)),
    Case("dp", 1, (8, 4, 1024), LAYER, shape=DROPPING),
    Case("tp4sp", 4, (8, 4, 1024), LAYER, shape=DROPPING),
    Case("cp2", 2, (4, 2, 1024), LAYER, shape=DROPPING),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS,), shape=LATENT),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, SELECTIVE, "recompute.modules=[norm,activation]"), shape=LATENT),
    Case("dp", 1, (8, 4, 2048), NEXT_LAYER, (FEW_WORDS, "recompute=full"), shape=LATENT),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, SELECTIVE, "recompute.modules=[mla_up]"), shape=LATENT),
    Case("tp4sp", 4, (8, 4, 2048), LOSS, (FEW_WORDS,), shape=LATENT),
    Case("tp4", 4, (8, 4, 2048), LOSS, (FEW_WORDS,), shape=LATENT),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS,), shape=LATENT),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, "parallel.cp_comm_type=allgather"), shape=LATENT),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, MATH)),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, MATH), precision="fp32"),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, MATH), shape=LATENT),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, MATH, SOFT_CAP, SINKS)),
    Case("tp4sp", 4, (8, 4, 1024), LAYER, (MATH,), shape=DROPPING),
    LONG_MATH,
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, *ALL_KEYS)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH), precision="fp32"),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, PACKED)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, SOFT_CAP, SINKS)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, WINDOW)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SOFT_CAP, WINDOW), **NO_CALL),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, MATH), shape=LATENT),
    Case("tp4sp", 4, (4, 2, 4096), LAYER, (MATH,), shape=DROPPING),
    Case("cp2", 2, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, "parallel.cp_comm_type=a2a")),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, MATH)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, MATH, "parallel.cp_comm_type=a2a")),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.attention_backend=flash", PACKED)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, FLEX, SINKS)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, DROPOUT)),  # by FlexAttention
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, DROPOUT, SINKS, PACKED)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, DROPOUT, SELECTIVE)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.attention_backend=flash_attn", PACKED)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, "model.attention_backend=te")),
    Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, "model.attention_backend=efficient", PACKED)),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, PACKED)),  # all documents in one call
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, PACKED, "parallel.cp_comm_type=allgather", *ALL_KEYS)),  # by chunk
    Case("cp2", 2, (4, 4, 2048), LAYER, (FEW_WORDS, PACKED, "parallel.cp_comm_type=a2a")),
    # The gradients of the keys of all ranks are the peak: by blocks with sinks, of every query head, and with scores.
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS, "parallel.cp_comm_type=allgather", *ALL_KEYS)),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, "parallel.cp_comm_type=allgather", "model.ffn_hidden_size=1024")),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, MATH, "parallel.cp_comm_type=allgather", *ALL_KEYS)),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, "model.ffn_hidden_size=1024")),  # a ring
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, PACKED), shape=LATENT),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, SOFT_CAP)),  # FlexAttention
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SOFT_CAP, WINDOW, "model.sliding_window_pattern=2")),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SOFT_CAP, "parallel.cp_comm_type=allgather")),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SOFT_CAP)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SOFT_CAP), precision="fp32"),  # by scores
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, SOFT_CAP, *ALL_KEYS)),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS, PACKED, FLEX, "model.ffn_hidden_size=1024")),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, SOFT_CAP, FLEX, "model.ffn_hidden_size=1024"), precision="fp32"),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, FLEX), shape=LATENT),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, DROPOUT)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, DROPOUT, "parallel.cp_comm_type=a2a")),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, SOFT_CAP, "model.ffn_hidden_size=1024", *TWO_LEVELS)),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, "model.ffn_hidden_size=1024", *TWO_LEVELS)),
    Case("dp", 1, (8, 4, 2048), LOSS, (FEW_WORDS, PACKED, *ONE_GROUP), **NO_CALL),  # k and v of every head
    Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, PACKED), precision="fp32"),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, PACKED, SELECTIVE, "recompute.modules=[attention]")),
    Case("dp", 1, (8, 4, 2048), LAYER, (FEW_WORDS, PACKED, SELECTIVE, "recompute.modules=[attention]"), **NO_CALL),
    Case("dp", 1, (8, 1, 2048), LOSS, (FEW_WORDS, WINDOW, *ONE_GROUP), **NO_CALL),  # and a mask for each row
    Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, *MIXED), **NO_CALL),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, *MIXED)),  # layers with a window in one call
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, WINDOW, "parallel.cp_comm_type=allgather", *ALL_KEYS)),
    Case("cp2", 2, (4, 2, 4096), LAYER, (FEW_WORDS, *MIXED)),  # a ring
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS, *MIXED)),
    Case("dp", 1, (4, 2, 4096), LOSS, (FEW_WORDS, SINKS, "model.ffn_hidden_size=1024")),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS, SELECTIVE, "recompute.modules=[attention]")),
    Case("dp", 1, (4, 2, 2048), LAYER, (FEW_WORDS, WINDOW, "model.attention_backend=efficient")),
    Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, "model.attention_backend=efficient")),
    Case("tp2", 2, (4, 4, 2048), LAYER, (FEW_WORDS, PACKED), **NO_CALL),
    Case("cp2", 2, (4, 4, 2048), LAYER, (FEW_WORDS, PACKED, "parallel.cp_comm_type=a2a"), **NO_CALL),
    Case("dp", 1, (8, 4, 1024), LAYER, (FEW_WORDS, SINKS)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS)),
    Case("dp", 1, (4, 2, 4096), LAYER, (FEW_WORDS, SINKS, WINDOW, PACKED)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SINKS)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SINKS, "parallel.cp_comm_type=allgather")),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SINKS, "parallel.cp_comm_type=a2a")),
    Case("cp2", 2, (2, 1, 4096), LAYER, (FEW_WORDS, SINKS, "parallel.cp_comm_type=a2a")),
    Case("zero0", 4, (8, 1, 64), STEP_END, ("precision.grad_reduce_dtype=bf16",)),
    Case(
        "pp3", 6, (12, 1, 128), MICROBATCH_END, ("parallel.data_sharding=no_shard", "precision.grad_reduce_dtype=bf16")
    ),
    Case("zero1", 2, (4, 1, 256), GRAD_REDUCE, ("precision.exp_avg_dtype=bf16",)),
    Case("zero0", 4, (16, 1, 64), STEP_END, ("precision.grad_dtype=bf16", "precision.grad_reduce_dtype=bf16")),
    Case("zero1", 4, (16, 1, 64), MICROBATCH_END, ("precision.grad_dtype=bf16",)),
    Case("zero2", 4, (16, 2, 2048), LAYER, (FEW_WORDS, "precision.grad_dtype=bf16")),
    Case("pp3", 3, (6, 1, 128), MICROBATCH_END, ("precision.grad_dtype=bf16",)),
    Case("dp", 1, (1, 1, 256), STEP_END, (MAIN_IN_BF16, "precision.grad_dtype=bf16")),  # kernels need no copies
    Case("dp", 1, (1, 1, 256), STEP_END, (MAIN_IN_BF16, "precision.grad_dtype=bf16", "optimizer=lion")),
    Case("dp", 1, (1, 1, 256), UPDATE, (MAIN_IN_BF16, "precision.grad_dtype=bf16", "optimizer=sgd")),
    Case("dp", 1, (1, 1, 256), UPDATE, (MAIN_IN_BF16, "precision.grad_dtype=bf16"), platform="mtt_s4000"),
    Case("dp", 1, (1, 1, 256), STEP_END, (MAIN_IN_BF16, "optimizer=muon")),
    Case("dp", 1, (8, 4, 2048), LOSS, (MAIN_IN_BF16,)),
    Case("zero0", 4, (8, 1, 64), STEP_END, (MAIN_IN_BF16,)),
    Case("zero1", 4, (16, 1, 64), MICROBATCH_END, (MAIN_IN_BF16,)),
    Case("zero2", 4, (16, 2, 128), GRAD_REDUCE, (FEW_WORDS, MAIN_IN_BF16)),
    Case("zero3", 8, (32, 2, 1024), LAYER, (FEW_WORDS, MAIN_IN_BF16)),
    Case("zero3hsdp2", 4, (16, 2, 256), STEP_END, (MAIN_IN_BF16,)),
    Case("pp3", 3, (6, 1, 128), STEP_END, (MAIN_IN_BF16,)),
    Case("zero1", 8, (8, 1, 256), GRAD_REDUCE, (FEW_WORDS,)),
    Case("zero2", 4, (16, 2, 2048), LAYER, (FEW_WORDS,)),
    Case("zero3", 8, (32, 2, 1024), LAYER, (FEW_WORDS,)),
    Case("zero3hsdp2", 4, (16, 2, 2048), LOSS),
    Case("tp4", 4, (4, 2, 2048), LOSS),
    Case("tp4sp", 4, (4, 2, 2048), LOSS, (FEW_WORDS,)),
    Case("tp4sp", 4, (4, 2, 2048), LOSS, NARROW),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS,)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, "parallel.cp_comm_type=allgather")),
    Case("cp2", 2, (4, 2, 2048), LOSS, ("parallel.cp_comm_type=a2a",)),
    Case("pp3", 3, (6, 1, 2048), LAYER),
    Case("pp3", 3, (6, 1, 2048), LAYER, ("precision.residual_dtype=fp32", FEW_WORDS), rank=1),
    Case("pp2vpp4", 2, (8, 1, 2048), LAYER, MANY_CHUNKS),
    Case("pp2vpp4", 4, (16, 1, 64), GRAD_REDUCE, MANY_CHUNKS, rank=2),
    Case("pp3", 3, (6, 1, 128), MICROBATCH_END),
    Case("pp3", 6, (12, 1, 128), STEP_END, ("parallel.data_sharding=no_shard",)),
    Case("pp3zero2", 6, (12, 1, 2048), LAYER, (FEW_WORDS,)),
    Case("pp3zero2", 6, (12, 1, 64), MICROBATCH_END),
    Case("pp3zero2", 6, (12, 1, 64), MICROBATCH_END, shape=GPT2),
    Case("pp3zero3", 12, (24, 1, 2048), LAYER, (FEW_WORDS,)),
    Case("pp2vpp2zero2", 4, (16, 1, 64), GRAD_REDUCE, (*MANY_CHUNKS, FEW_WORDS), rank=2),
    Case("pp2vpp2zero3", 4, (16, 1, 64), GRAD_REDUCE, (*MANY_CHUNKS, FEW_WORDS), rank=2),
    Case("pp2vpp2zero3", 4, (16, 1, 2048), LAYER, (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=zbv")),
    Case("pp2vpp2zero3", 4, (16, 1, 128), GRAD_REDUCE, (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=zero_bubble")),
    Case("pp2vpp2", 2, (8, 1, 2048), LAYER, (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=zbv", "recompute=full"), 1),
    Case("pp2vpp2", 2, (8, 1, 2048), LAYER, (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=zero_bubble"), rank=1),
    Case("pp2vpp2", 2, (4, 1, 2048), LATER_LAYER, FIRST_STAGE),  # of which no pass for inputs leaves anything
    Case("pp2vpp2", 2, (4, 1, 2048), LATER_LAYER, FIRST_STAGE, precision="fp8_rowwise"),
    Case(
        "pp2vpp2",
        4,
        (16, 1, 2048),
        LAYER,
        (*MANY_CHUNKS, FEW_WORDS, "parallel.schedule=dualpipev", "recompute=full"),
        2,
    ),
    Case("dp", 2, (2, 1, 256), TIED, ("model.tie_word_embeddings=true", "model.vocab_size=65536", "recompute=full")),
    Case("zero2", 2, (6, 1, 64), TIED, ("model.tie_word_embeddings=true", "model.vocab_size=65536")),
    Case("pp2vpp2", 2, (2, 1, 2048), LATER_LOSS, ("model.num_layers=4", "model.vocab_size=65536"), rank=1),
    Case("zero3", 2, (4, 2, 1024), NEXT_LAYER, (FEW_WORDS, "recompute=full")),
    Case("pp3", 3, (6, 1, 2048), LAYER, rank=2),
    Case("pp3", 3, (6, 1, 2048), LOSS, ("model.vocab_size=65536",), rank=2),  # with the logits of the one before
    Case("pp3", 3, (3, 1, 2048), LATER_LAYER, ("parallel.schedule=gpipe",), rank=2),
    Case("dp", 1, (4, 4, 2048), LOSS, ("model.vocab_size=98304", "train.loss_chunks=1")),
    Case("dp", 1, (8, 4, 2048), LOSS, platform="mtt_s4000"),  # without Triton the loss is in fp32
    Case("pp3", 3, (3, 1, 2048), LOSS, ("parallel.schedule=gpipe",), rank=2, platform="mtt_s4000"),
    Case("dp", 1, (8, 4, 2048), LOSS, ("train.loss_chunks=4",)),
    Case("dp", 1, (4, 4, 2048), LOSS, ("model.vocab_size=98304",)),  # four chunks by default
    Case("zero2", 4, (4, 1, 2048), LOSS, ("train.loss_chunks=16", "model.vocab_size=65536")),  # the sum in fp32
    Case("zero2", 4, (8, 1, 1024), MICROBATCH_END, ("train.loss_chunks=16", "model.vocab_size=65536")),
    Case("zero2", 4, (12, 1, 256), MICROBATCH_END, ("train.loss_chunks=16", "model.vocab_size=65536")),
    Case("zero2hsdp2", 4, (16, 1, 256), MICROBATCH_END, ("train.loss_chunks=16", "model.vocab_size=65536")),
    Case("dp", 1, (8, 4, 2048), LAYER, ("train.loss_chunks=32",)),
    Case("dp", 1, (4, 4, 2048), LOSS, ("train.loss_chunks=2",), precision="fp32"),
    Case("tp4sp", 4, (4, 2, 2048), LOSS, ("train.loss_chunks=4",)),
    Case("pp3", 3, (3, 1, 2048), LOSS, ("train.loss_chunks=4", "parallel.schedule=gpipe"), rank=2),
    Case("tp2pp3sp", 6, (6, 2, 2048), LAYER, rank=2),
    Case("dp", 1, (4, 4, 512), LAST_LAYER, (FEW_WORDS, "recompute=full"), precision="fp32"),
    Case("zero1", 2, (2, 1, 256), GRAD_REDUCE, (FEW_WORDS, "recompute=full"), precision="fp32"),
]


def _on_processors(layout: str, ranks: int, batch: tuple[int, int, int], moment: str, *overrides: str) -> Case:
    return Case(layout, ranks, batch, moment, overrides, platform="cpu", precision="fp32")


DEALT = ("parallel.dynamic_context_parallel=true", "data.reset_attention_mask=true")
CASES += [
    _on_processors("dp", 1, (4, 4, 512), LOSS, CAPPED),
    _on_processors("dp", 1, (4, 4, 512), LOSS),
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS),  # attention's weights are kept
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, "data.reset_attention_mask=true"),  # none, but a mask
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, "model.sliding_window=64"),
    _on_processors("dp", 1, (2, 2, 1024), LAYER, FEW_WORDS),  # so many are not
    _on_processors("dp", 1, (4, 4, 512), LAST_LAYER, FEW_WORDS, "recompute=full"),
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, SELECTIVE, "recompute.modules=[attention]"),
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, "model.attention_backend=flash"),
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, MATH),
    _on_processors("dp", 1, (4, 4, 512), LAYER, FEW_WORDS, GATED),
    _on_processors("tp2", 2, (8, 4, 512), LOSS),
    _on_processors("tp2sp", 2, (8, 4, 512), LOSS),
    _on_processors("tp4sp", 4, (8, 4, 512), LOSS, *NARROW),
    _on_processors("zero3", 2, (8, 4, 512), LAYER, FEW_WORDS),
    _on_processors("cp2", 2, (4, 4, 512), LOSS),
    _on_processors("cp2", 2, (4, 4, 512), LAYER, FEW_WORDS, "parallel.cp_comm_type=a2a"),
    _on_processors("cp2", 2, (4, 4, 512), LAYER, FEW_WORDS, "parallel.cp_comm_type=allgather"),
    _on_processors("cp2", 2, (4, 4, 512), LAYER, FEW_WORDS, *DEALT),
    _on_processors("pp3", 3, (6, 2, 512), LAYER, FEW_WORDS),
    Case("dp", 1, (4, 4, 512), LAYER, (FEW_WORDS,), platform="cpu"),
    Case("zero1", 2, (2, 1, 256), GRAD_REDUCE, (FEW_WORDS,), platform="cpu"),
    # Matmuls convert to fp32: those of the down projection, or those of the weights' gradients of a narrow block.
    Case("tp2pp2sp", 4, (8, 4, 512), LAYER, (FEW_WORDS, "model.num_layers=4"), platform="cpu"),
    Case("tp4sp", 4, (8, 4, 512), LOSS, NARROW, platform="cpu"),
    # Those of the head. With MTP the logits of pending microbatches are in fp32 alone.
    Case("zero3", 2, (4, 2, 512), LOSS, ("model.hidden_size=512", "model.ffn_hidden_size=1408"), platform="cpu"),
    Case("pp3", 3, (6, 2, 512), LOSS, ("parallel.schedule=gpipe", "model.mtp.num_layers=1"), rank=2, platform="cpu"),
]

EXPERTS = ("model=mixtral_8x7b", *LLAMA[1:7], FEW_WORDS)
IMBALANCE = "parallel.moe_load_imbalance"  # the simulated rank is the busiest one
CAPACITY = ("model.moe.capacity_factor=1.5", "model.moe.balance_loss=batch", "model.moe.balance_loss_coeff=0.01")


def _with_experts(layout: str, *overrides: str, **settings: str) -> Case:
    return Case(layout, 4, (16, 2, 2048), LAYER, overrides, shape=EXPERTS, **settings)


ONE_OF_EXPERTS = Case("zero3", 2, (4, 2, 512), GRAD_REDUCE, ("model.num_layers=1",), shape=EXPERTS)
BUSIEST = _with_experts("ep4", f"{IMBALANCE}=2")
CASES += [
    BUSIEST,
    ONE_OF_EXPERTS,
    _with_experts("ep4"),
    _with_experts("ep4", f"{IMBALANCE}=2", "parallel.moe_token_dispatcher_type=allgather"),
    _with_experts("ep4", f"{IMBALANCE}=2", *CAPACITY),
    _with_experts("ep4", *CAPACITY, "model.moe.pad_to_capacity=true"),
    _with_experts("ep2tp2", f"{IMBALANCE}=1.5"),
    _with_experts("ep2etp2", f"{IMBALANCE}=1.5"),
    _with_experts("etp2", f"{IMBALANCE}=1.5"),
    _with_experts("etp2", f"{IMBALANCE}=1.5", "parallel.moe_token_dispatcher_type=allgather"),
    _with_experts("ep4", f"{IMBALANCE}=2", precision="fp8_blockwise"),
    _with_experts("ep4", precision="fp8_rowwise"),
    _with_experts("ep4", precision="mxfp8", platform="b200"),
    # Experts of one data-parallel rank that are computed with their main parameters: no copies, and no reduction.
    Case("ep4", 4, (4, 1, 512), LAST_LAYER, shape=EXPERTS, precision="fp32"),
    Case("ep4", 4, (16, 1, 256), LAYER, shape=EXPERTS, precision="fp32"),
    Case("zero2ep4", 4, (12, 1, 512), LAYER, shape=EXPERTS, precision="fp32"),
    Case("pp3ep2", 6, (12, 1, 512), LAYER, shape=EXPERTS, precision="fp32"),
    Case("ep2tp2sp", 4, (4, 2, 256), GRAD_REDUCE, shape=EXPERTS, precision="fp32", platform="cpu"),
    Case("ep4", 4, (8, 1, 512), LAYER, (MAIN_IN_BF16, "precision.grad_dtype=bf16"), shape=EXPERTS),
]


def _predicted(case: Case) -> Memory:
    topology = Topology.from_spec(case.spec)
    return memory_by_rank(case.spec)[case.rank // (topology.world // topology.pp)]


ONE_EACH = {(case.platform, case.moment, MATH in case.overrides): case for case in CASES if case.shape != EXPERTS}
BLOCKWISE = Case("dp", 1, (4, 2, 1024), LAYER, (FEW_WORDS,), precision="fp8_blockwise")
SGD = Case("dp", 1, (2, 1, 256), GRAD_REDUCE, ("optimizer=sgd",))
EMULATED = Case("dp", 1, (4, 4, 1024), LAYER, (FEW_WORDS, EMULATE), precision="fp8")


def _emulated(layout: str, ranks: int, batch: tuple[int, int, int], *overrides: str, **settings: str) -> Case:
    """A case of fp8 matmuls in fp32, of one scale for a tensor unless `settings` name another precision."""
    return Case(layout, ranks, batch, LAYER, (FEW_WORDS, EMULATE, *overrides), **{"precision": "fp8", **settings})


CASES += [
    Case("dp", 1, (4, 4, 1024), LAYER, (FEW_WORDS,), precision="fp8"),
    Case("dp", 1, (4, 4, 2048), LAYER, (FEW_WORDS, "model.num_layers=1"), precision="fp8"),
    Case("zero3hsdp2", 4, (4, 1, 256), STEP_END, ("optimizer=muon", "model.vocab_size=32768"), precision="fp8"),
    EMULATED,
    _emulated("dp", 1, (4, 4, 1024), platform="a100_80gb", precision="mxfp8"),
    _emulated("dp", 1, (4, 4, 1024), precision="fp8_rowwise"),
    _emulated("dp", 1, (4, 4, 1024), platform="cpu", precision="fp8_blockwise"),
    _emulated("dp", 1, (4, 4, 1024), platform="cpu", precision="fp8_delayed"),
    _emulated("dp", 1, (8, 4, 2048), "precision.fp8.wgrad=false"),
    _emulated("dp", 1, (8, 4, 1024), "precision.fp8.first_layers_bf16=1", platform="cpu"),
    _emulated("dp", 1, (8, 4, 2048), SELECTIVE, "recompute.modules=[norm,mlp]"),
    Case("dp", 1, (8, 4, 2048), NEXT_LAYER, (FEW_WORDS, EMULATE, "recompute=full"), precision="fp8"),
    Case("dp", 1, (4, 1, 512), NEXT_LAYER, (FEW_WORDS, EMULATE), precision="fp8"),  # weights in fp32
    _emulated("tp2", 2, (8, 4, 1024)),
    _emulated("tp4", 4, (8, 4, 2048), "model.ffn_hidden_size=1024"),  # at the projections of the block's input
    _emulated("tp4sp", 4, (8, 4, 2048), "model.ffn_hidden_size=1024", precision="mxfp8"),
    _emulated("pp3", 3, (6, 1, 2048), precision="fp8_delayed"),
    _emulated("tp2pp2sp", 4, (8, 4, 512), "model.num_layers=4", platform="cpu"),
    _emulated("zero3", 8, (32, 2, 1024)),
    _emulated("dp", 1, (8, 4, 1024), shape=DROPPING),
    _emulated("dp", 1, (8, 4, 1024), shape=LATENT),
    _with_experts("ep4", EMULATE, precision="fp8"),
    _with_experts("ep4", EMULATE, f"{IMBALANCE}=2", precision="fp8_blockwise"),
    _with_experts("ep2etp2", EMULATE, precision="fp8_delayed"),
    _with_experts("ep4", EMULATE, "model.moe.ffn_hidden_size=512", "model.moe.num_experts=16", precision="mxfp8"),
    Case("dp", 1, (4, 2, 1024), LAYER, (FEW_WORDS,), precision="fp8_delayed"),
    Case("dp", 1, (4, 2, 1024), LAYER, (FEW_WORDS,), precision="fp8_rowwise"),
    BLOCKWISE,
    Case("dp", 1, (4, 2, 1024), LAYER, (FEW_WORDS,), platform="b200", precision="mxfp8"),
    SGD,
    Case("dp", 1, (4, 2, 1024), LAYER, (FEW_WORDS, "model.attention_backend=cudnn")),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SINKS, *DEALT)),  # whole documents: one on each rank
    Case("cp2", 2, (2, 1, 2048), LAYER, (FEW_WORDS, SINKS, *DEALT)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SOFT_CAP, *DEALT)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, *DEALT)),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, *DEALT), shape=LATENT),
    Case("cp4", 4, (4, 2, 4096), LAYER, (FEW_WORDS, *DEALT)),
    Case("cp4", 4, (4, 1, 4096), LAYER, (FEW_WORDS, *DEALT)),
    Case("cp4", 4, (4, 1, 4096), LAYER, (FEW_WORDS, SOFT_CAP, SINKS, *DEALT)),
    Case("cp2", 2, (2, 1, 2048), LAYER, (FEW_WORDS, SINKS, *DEALT), **NO_CALL),
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, SOFT_CAP, *DEALT), precision="fp32"),  # by scores
    Case("cp2", 2, (4, 2, 2048), LAYER, (FEW_WORDS, "model.attention_backend=flash", SINKS, *DEALT)),
]


OF_EACH_VALUE = ("model.attention_backend", "recompute", "parallel.schedule", "optimizer")


def _traits(case: Case) -> set[object]:
    """Its axes, and the keys of its overrides, of a few keys with the value."""
    axes = re.findall(r"zero\d|[a-z]+", case.layout)
    keys = [(key if (key := one.split("=")[0]) not in OF_EACH_VALUE else one) for one in case.overrides]
    return {*axes, *keys, case.moment, case.shape, case.platform, case.precision}


# One of each moment on GPUs, one on processors, and one of experts.
MOMENTS = {case.moment: case for case in ONE_EACH.values() if case.platform == "h100" and MATH not in case.overrides}
QUICK = [
    *(MOMENTS | {GRAD_REDUCE: SGD}).values(),
    ONE_EACH["cpu", LAYER, True],
    BUSIEST,
    EMULATED,
    ONE_LAYER,
    HSDP_MUON,
]
DAILY = [*ONE_EACH.values(), BLOCKWISE, LONG_MATH]
CASES_OF_ALL = slow_but(CASES, *QUICK, slow=DAILY, every=covering(CASES, _traits, besides=[*QUICK, *DAILY]))


@pytest.mark.parametrize("case", CASES_OF_ALL, ids=lambda case: case.name)
def test_the_peak_of_a_step(case):
    measured, predicted = deep_plan(case.spec, case.rank), _predicted(case)
    table = f"\nmeasured in {measured.phase}: {measured.kinds}\npredicted {predicted.phase}: {predicted.kinds}"
    assert predicted.total == pytest.approx(measured.total, rel=CLOSE), table
    assert predicted.phase == case.moment, table
