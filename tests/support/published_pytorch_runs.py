"""Published runs of PyTorch-native stacks on H100, as specs; where a source is silent the row says what is assumed."""

from __future__ import annotations

from dataclasses import replace

from published_runs import Published

from megalaunch.plan.cost import PYTORCH_COMPILED, PYTORCH_EAGER, Stack
from megalaunch.platform.chips import CHIPS

# The card of torchtitan's and torchao's figures: H100 SXM with 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W.
# torchtitan's report puts its peak between those of H100 SXM and H100 NVL; it has NVL's here, the lower one.
H100_500W = replace(
    CHIPS["h100"],
    name="H100 96 GB, 500 W",
    memory_bytes=96 * 2**30,
    memory_bandwidth=2.4e12,
    peak_flops=CHIPS["h100_nvl"].peak_flops,
)


def _selective(stack: Stack) -> Stack:
    """torchtitan's selective recomputation by operator: every second matmul (wk, wo and w3) and what is elementwise."""
    return stack.with_value("selective_matmuls", 79.7 / 218.1)


_BF16 = ("precision=bf16",)  # gradients are reduced in fp32
_REDUCED_IN_BF16 = ("precision=bf16", "precision.grad_dtype=bf16", "precision.grad_reduce_dtype=bf16")
_FP8 = ("precision.compute_dtype=fp8", "precision.fp8.param_gather=true")
_SELECTIVE = ("recompute=selective", "recompute.modules=[mlp]")
_LLAMA2_13B = (
    "model=llama2_7b",
    "model.name=llama2_13b",
    "model.num_layers=40",
    "model.hidden_size=5120",
    "model.ffn_hidden_size=13824",
    "model.num_attention_heads=40",
    "model.num_query_groups=40",
)
_EIGHT = ("model=llama3_8b",)
_SLOW_NETWORK = "cluster.node_bandwidth=12.5"  # 800 Gb/s a node of 8

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: local batch 2, selective recomputation.
TORCHTITAN = tuple(
    Published(
        f"torchtitan 8B {kind}, {gpus}",
        _EIGHT,
        gpus,
        "zero3",
        (8192, 2, 2 * gpus),
        (*(_FP8 if kind == "fp8" else _BF16), *_SELECTIVE),
        rate,
        stack=_selective(PYTORCH_EAGER if kind == "eager" else PYTORCH_COMPILED),
        chip=H100_500W,
    )
    for kind, gpus, rate in (
        ("eager", 8, 5762),
        ("compiled", 8, 6667),
        ("fp8", 8, 8532),
        ("eager", 128, 5605),
        ("compiled", 128, 6514),
        ("fp8", 128, 8380),
    )
)
# torchao, float8 training on 8 GPUs with torchtitan: local batch 1. The card is assumed to be torchtitan's.
TORCHAO = tuple(
    Published(
        f"torchao 8B {kind}, 8",
        _EIGHT,
        8,
        "zero3",
        (8192, 1, 8),
        (*precision, *_SELECTIVE),
        rate,
        stack=_selective(PYTORCH_COMPILED),
        chip=H100_500W,
    )
    for kind, precision, rate in (("compiled", _BF16, 6150), ("fp8", _FP8, 7690))
)
# IBM and Meta, "Supercharging Training using float8 and FSDP2": compiled; batch and recomputation are those that were
# fastest, and not said: torchtitan's are assumed.
IBM = tuple(
    Published(
        f"IBM 8B {kind}, 128",
        _EIGHT,
        128,
        "zero3",
        (8192, 2, 256),
        (*precision, *_SELECTIVE),
        rate,
        stack=_selective(PYTORCH_COMPILED),
    )
    for kind, precision, rate in (("compiled", _BF16, 8000), ("fp8", _FP8, 10000))
)
# fms-fsdp on 96 H100, batch 2: HSDP within nodes for 7B, else FSDP. Eager: the earlier README, 800 Gb/s a node;
# compiled: 3.2 Tb/s (PyTorch's blog of May 2024). 13B recomputes selectively: mlp assumed.
FMS_FSDP = (
    Published(
        "fms-fsdp 7B eager, 96",
        ("model=llama2_7b",),
        96,
        "hsdp12zero3",
        (4096, 2, 192),
        (*_REDUCED_IN_BF16, _SLOW_NETWORK),
        7500,
        stack=PYTORCH_EAGER,
    ),
    Published(
        "fms-fsdp 13B eager, 96",
        _LLAMA2_13B,
        96,
        "zero3",
        (4096, 2, 192),
        (*_REDUCED_IN_BF16, _SLOW_NETWORK, *_SELECTIVE),
        3800,
        stack=PYTORCH_EAGER,
    ),
    Published(
        "fms-fsdp 7B compiled, 96",
        ("model=llama2_7b",),
        96,
        "hsdp12zero3",
        (4096, 2, 192),
        _REDUCED_IN_BF16,
        9600,
        stack=PYTORCH_COMPILED,
    ),
    Published(
        "fms-fsdp 13B compiled, 96",
        _LLAMA2_13B,
        96,
        "zero3",
        (4096, 2, 192),
        (*_REDUCED_IN_BF16, *_SELECTIVE),
        4850,
        stack=PYTORCH_COMPILED,
    ),
    Published(
        "fms-fsdp 70B compiled, 96",
        ("model=llama2_70b",),
        96,
        "zero3",
        (4096, 2, 192),
        (*_REDUCED_IN_BF16, "recompute=full"),
        890,
        stack=PYTORCH_COMPILED,
    ),
)
PYTORCH = (*TORCHTITAN, *TORCHAO, *IBM, *FMS_FSDP)
