"""Published training runs as specs: layout, and what was measured (facts of NVIDIA's repositories, H100 SXM 80 GB).

Where a source is silent the row says what is assumed. Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from made_specs import resolved

from megalaunch.plan.cost import MEGATRON, Stack, StepTime, step_time
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.schema import RunSpec, with_values

_NEMOTRON = (
    "model=llama3_8b",
    "model.activation=squared_relu",
    "model.norm=layernorm",
    "model.vocab_size=256000",
    "model.num_query_groups=8",
    "model.rope.fraction=0.5",
)
_NEMOTRON_15B = (
    *_NEMOTRON,
    "model.name=nemotron4_15b",
    "model.num_layers=32",
    "model.hidden_size=6144",
    "model.ffn_hidden_size=24576",
    "model.num_attention_heads=48",
)
_NEMOTRON_340B = (
    *_NEMOTRON,
    "model.name=nemotron4_340b",
    "model.num_layers=96",
    "model.hidden_size=18432",
    "model.ffn_hidden_size=73728",
    "model.num_attention_heads=96",
)
# Megatron-LM tests/functional_tests/test_cases/gpt/gpt3_7b_*: Megatron's defaults where its arguments are silent
# (inner width 4 h, gelu, LayerNorm, biases, learned positions, dropout 0.1).
_GPT_7B = (
    "model=gpt3_6_7b",
    "model.name=megatron_7b",
    "model.num_query_groups=8",
    "model.tie_word_embeddings=false",
    "model.max_position_embeddings=8192",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
)
_GPT3 = ("model=gpt3_175b", "model.vocab_size=51200", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
_BF16 = ("precision=bf16", "precision.grad_dtype=bf16", "precision.grad_reduce_dtype=bf16")
_FP8 = (
    "precision.compute_dtype=fp8",
    "precision.grad_dtype=bf16",
    "precision.grad_reduce_dtype=bf16",
    "precision.fp8.param_gather=true",
)
_OVERLAP = ("parallel.tp_comm_overlap=true", "parallel.overlap_p2p_comm=true")


# The rows that constants of MEGATRON in plan/cost/stacks.py were set on, one row each.
CALIBRATED = {
    "matmul_16": "Llama-3.1-70B bf16, 64",
    "tp_exposed": "Llama-3.1-405B bf16, 512",
    "matmul_8": "Llama3.1-405B FP8, 1024",
}


@dataclass(frozen=True)
class Published:
    """One run. `tokens` are tokens/s/GPU, `gigabytes` the measured peak (10^9), `layout` a layout name.

    `batch` is (sequence, micro batch, global batch), `stack` whose kernels it ran on, `chip` its card if it is none of
    the table of chips.
    """

    name: str
    model: tuple[str, ...]
    gpus: int
    layout: str
    batch: tuple[int, int, int]
    overrides: tuple[str, ...] = ()
    tokens: float | None = None
    gigabytes: float | None = None
    note: str = ""
    stack: Stack = MEGATRON
    chip: ChipFacts | None = None

    def time(self, stack: Stack | None = None) -> StepTime:
        """The predicted time, with the kernels of another stack if given.

        Chunks of the loss count for memory only: the stacks of this table hold whole logits, or few large chunks.
        """
        return step_time(with_values(self.spec, {"train.loss_chunks": 1}), stack or self.stack, self.chip)

    def error(self, stack: Stack | None = None) -> float:
        """Predicted over measured tokens/s, less 1."""
        assert self.tokens is not None, "a row with a rate"
        return self.time(stack).tokens_per_second_per_device / self.tokens - 1

    @property
    def spec(self) -> RunSpec:
        """The resolved spec."""
        length, micro, total = self.batch
        per_node = min(8, self.gpus)
        spec, _ = resolved(
            *self.model,
            f"parallel={self.layout}",
            "platform=h100",
            f"cluster.nodes={self.gpus // per_node}",
            f"cluster.devices_per_node={per_node}",
            f"batch.sequence_length={length}",
            f"batch.micro_batch_size={micro}",
            f"batch.global_batch_size={total}",
            "train.steps=100",
            "train.loss_chunks=1",  # whole logits, unless a row says otherwise
            *self.overrides,
        )
        return spec


DGXC = (
    Published(
        "Llama-3.1-8B bf16, 8",
        ("model=llama3_8b",),
        8,
        "cp2zero1",
        (8192, 1, 128),
        _BF16,
        10682,
        None,
        "dgxc 24.11-25.05",
    ),
    Published(
        "Llama-3.1-70B bf16, 64",
        ("model=llama3_70b",),
        64,
        "tp4pp4cp2vpp5spzero1",
        (8192, 1, 128),
        (*_BF16, *_OVERLAP),
        1118,
    ),
    Published(
        "Llama-3.1-405B bf16, 512",
        ("model=llama31_405b",),
        512,
        "tp8pp8cp2vpp8spzero1",
        (8192, 1, 256),
        (
            *_BF16,
            *_OVERLAP,
            "parallel.account_for_embedding_in_pipeline_split=true",
            "parallel.account_for_loss_in_pipeline_split=true",
        ),
        207,
    ),
    Published(
        "Nemotron-4-15B bf16, 16",
        _NEMOTRON_15B,
        16,
        "tp2spzero1",
        (4096, 2, 64),
        (*_BF16, "parallel.tp_comm_overlap=true"),
        6159,
    ),
    Published(
        "Nemotron-4-340B bf16, 256",
        _NEMOTRON_340B,
        256,
        "tp8pp8vpp12spzero1",
        (4096, 1, 64),
        (*_BF16, "parallel.tp_comm_overlap=true", "parallel.overlap_p2p_comm=true"),
        228,
        note="222 to 235 over releases",
    ),
    Published("GPT-3 175B bf16, 128", _GPT3, 128, "tp4pp8vpp12spzero1", (2048, 1, 256), (*_BF16, *_OVERLAP), 460),
    Published(
        "Llama-2-70B MaxText bf16, 64",
        ("model=llama2_70b",),
        64,
        "zero3",
        (4096, 2, 128),
        (*_BF16, "recompute=selective", "recompute.modules=[attention,norm,mlp]"),
        1170,
        note="dgxc 25.01, maxtext/configure.sh: JAX, FSDP 64; keeps the outputs of projections and of down",
    ),
)
BRIDGE = (
    Published(
        "Llama3-8B FP8, 8",
        ("model=llama3_8b",),
        8,
        "zero3",
        (8192, 1, 128),
        _FP8,
        14451,
        note="Megatron-FSDP, 25.11; whether layers were recomputed is not said",
    ),
    Published(
        "Llama3-70B FP8, 64", ("model=llama3_70b",), 64, "tp4pp8vpp5spzero1", (8192, 1, 256), (*_FP8, *_OVERLAP), 1652
    ),
    Published(
        "Llama3.1-405B FP8, 1024",
        ("model=llama31_405b",),
        1024,
        "tp8pp8cp2vpp8spzero1",
        (8192, 1, 1536),
        (
            *_FP8,
            *_OVERLAP,
            "parallel.account_for_embedding_in_pipeline_split=true",
            "parallel.account_for_loss_in_pipeline_split=true",
        ),
        327,
    ),
    Published(
        "Qwen3-8B bf16, 16",
        ("model=qwen3_8b",),
        16,
        "zero1",
        (4096, 1, 1024),
        _BF16,
        10456,
        note="verification card: real data, sanity check and no tuned run",
    ),
)
# Other rows with a layout, of stacks that the time model is not held to. Rows with experts force balanced routing.
_MOE_BF16 = (*_BF16, "parallel.overlap_moe_expert_parallel_comm=true")
OTHERS = (
    Published("Llama3-8B FP8 Megatron-LM, 8", ("model=llama3_8b",), 8, "cp2zero1", (8192, 1, 128), _FP8, 13812),
    Published(
        "Llama-2-70B FP8 NeMo, 64",
        ("model=llama2_70b",),
        64,
        "tp4pp4vpp20spzero1",
        (4096, 1, 128),
        (*_FP8, *_OVERLAP),
        1728,
        note="virtual stages and batch are not said",
    ),
    Published(
        "Mixtral 8x7B bf16, 64",
        ("model=mixtral_8x7b",),
        64,
        "ep8pp4vpp8zero1",
        (4096, 1, 256),
        _BF16,
        468e12 / 79.7e9,
        note="468 TFLOP/s; FLOPs a token by our counter",
    ),
    Published(
        "Mixtral 8x22B bf16, 128",
        ("model=mixtral_8x22b",),
        128,
        "tp4ep2pp8vpp7spzero1",
        (4096, 1, 256),
        _BF16,
        note="MCore's reference layout; the paper gives 49.3 % MFU",
    ),
    Published("Qwen3-30B-A3B bf16, 16", ("model=qwen3_30b_a3b",), 16, "ep16zero1", (4096, 1, 1024), _MOE_BF16, 13011),
    Published(
        "Qwen3-30B-A3B AutoModel bf16, 8",
        ("model=qwen3_30b_a3b",),
        8,
        "ep8zero3",
        (4096, 4, 512),
        (*_BF16, "recompute=full", "train.loss_chunks=16"),
        12040,
        note="activation_checkpointing in its file; logits whole there, the loss in 16 bits (fp32_upcast: false)",
    ),
    Published(
        "Moonlight-16B bf16, 16",
        ("model=moonlight_16b",),
        16,
        "ep8zero1",
        (4096, 2, 1024),
        (*_BF16, "recompute=selective"),
        22528,
        note="selective recomputation assumed",
    ),
    Published(
        "Qwen3-235B-A22B FP8, 256",
        ("model=qwen3_235b_a22b",),
        256,
        "tp2pp8ep32vpp4spzero1",
        (4096, 1, 8192),
        (
            *_FP8,
            "parallel.overlap_moe_expert_parallel_comm=true",
            "parallel.account_for_embedding_in_pipeline_split=true",
            "parallel.account_for_loss_in_pipeline_split=true",
        ),
        1712,
        note="Megatron-Bridge, scripts/performance/configs/qwen: 94 layers, embedding and loss as 96; no recomputation",
    ),
    Published(
        "DeepSeek-V3 bf16, 1024",
        ("model=deepseek_v3",),
        1024,
        "tp2pp8ep64spzero1",
        (4096, 1, 16384),
        (
            *_BF16,
            "parallel.overlap_moe_expert_parallel_comm=true",
            "recompute=full",
            "parallel.pipeline_layout=Et|(tt|)*30mL",
            "parallel.vpp=4",
        ),
        1061,
        note="TP2 PP8 VP4 EP64; stages and recomputation assumed",
    ),
    Published(
        "Llama-2-7B FP8 NeMo, 8",
        ("model=llama2_7b",),
        8,
        "zero1",
        (4096, 1, 128),
        _FP8,
        16934,
        note="layout and batch are not said: data parallelism assumed",
    ),
    Published(
        "Llama-2-13B FP8 NeMo, 16",
        ("model=llama2_13b",),
        16,
        "pp4vpp10zero1",
        (4096, 1, 128),
        (*_FP8, "parallel.overlap_p2p_comm=true"),
        8715,
        note="PP4; virtual stages and batch are not said",
    ),
    Published(
        "Llama3-405B FP8 Megatron-LM, 1024",
        ("model=llama31_405b",),
        1024,
        "tp8pp8cp2vpp8spzero1",
        (8192, 1, 512),
        (
            *_FP8,
            *_OVERLAP,
            "parallel.account_for_embedding_in_pipeline_split=true",
            "parallel.account_for_loss_in_pipeline_split=true",
        ),
        315,
        note="layout and batch as in Megatron-Bridge",
    ),
    Published(
        "Qwen3-30B-A3B FP8 Bridge 26.06, 16",
        ("model=qwen3_30b_a3b",),
        16,
        "ep16zero1",
        (4096, 1, 1024),
        _FP8,
        8826,
    ),
    Published(
        "DeepSeek-V3 FP8 Bridge 25.09, 1024",
        ("model=deepseek_v3",),
        1024,
        "tp2pp8ep64spzero1",
        (4096, 1, 8192),
        (
            *_FP8,
            "parallel.overlap_moe_expert_parallel_comm=true",
            "recompute=full",
            "parallel.pipeline_layout=Et|(tt|)*30mL",
            "parallel.vpp=4",
        ),
        1297,
        note="TP2 PP8 VP4 EP64; stages and recomputation assumed",
    ),
)
# Whose peaks Megatron's profile is held to. The logging rank of Megatron-LM is the last.
# Bridge's SFT recipe (perf_recipes/llama/h100): bf16 gradients, 8-bit parameters without cached transposes, head
# gradients deferred over 22 microbatches; the baseline recomputes core attention, as the table of its source says.
_SFT = ("precision.compute_dtype=fp8", "precision.grad_dtype=bf16", "precision.fp8.param_gather=true", *_OVERLAP)
_CORE = ("recompute=selective", "recompute.modules=[attention]")
_MLA_MOE = (
    "model=deepseek_v2_lite",
    "model.num_layers=16",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=4096",
    "model.num_attention_heads=32",
    "model.vocab_size=51712",
    "model.mla.q_lora_rank=1536",
    "model.mla.kv_lora_rank=512",
    "model.moe.num_experts=32",
    "model.moe.top_k=4",
    "model.moe.ffn_hidden_size=1024",
    "model.moe.shared_ffn_hidden_size=1024",
    "model.moe.first_k_dense_replace=1",
    "model.mtp.num_layers=1",
)
MEMORY_7B = (
    Published(
        "Megatron 7B, TP1 PP4 VPP8",
        (*_GPT_7B, "model.vocab_size=131200"),
        8,
        "pp4vpp8zero1",
        (8192, 1, 8),
        ("precision=bf16",),
        None,
        60.72,
    ),
    Published(
        "Megatron 7B, TP4",
        (*_GPT_7B, "model.vocab_size=131584"),
        8,
        "tp4zero1",
        (8192, 2, 8),
        ("precision=bf16",),
        None,
        57.14,
    ),
)
MEMORY_SFT = (
    Published(
        "Llama3-70B SFT, TP4 PP4",
        ("model=llama3_70b",),
        32,
        "tp4pp4vpp5spzero1",
        (4096, 1, 32),
        (*_SFT, *_CORE),
        None,
        58.8,
    ),
    Published(
        "Llama3-70B SFT, TP4 PP8",
        ("model=llama3_70b",),
        32,
        "tp4pp8vpp5spzero1",
        (4096, 1, 32),
        (*_SFT, *_CORE),
        None,
        53.2,
    ),
    Published(
        "Llama3-70B SFT, TP8 PP4",
        ("model=llama3_70b",),
        32,
        "tp8pp4vpp5spzero1",
        (4096, 1, 32),
        (*_SFT, *_CORE),
        None,
        50.2,
    ),
    Published(
        "Llama3-70B SFT, TP4 PP4, mlp again",
        ("model=llama3_70b",),
        32,
        "tp4pp4vpp5spzero1",
        (4096, 1, 32),
        (*_SFT, "recompute=selective", "recompute.modules=[mlp]"),
        None,
        55.6,
    ),
)
MEMORY_MOE = (
    Published(
        "MLA-MoE, TP2 PP2 EP4", _MLA_MOE, 8, "tp2pp2ep4vpp4spzero1", (4096, 4, 32), ("precision=bf16",), None, 60.11
    ),
)
