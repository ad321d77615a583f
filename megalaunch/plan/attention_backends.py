"""What each value of `model.attention_backend` computes, as data: devices, dtypes, head sizes, masks, determinism.

The rules of plan/rules/attention_backend.py refuse the rest before a run starts; the engine's forms are in
engine/model/attention/backends.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.platforms import FUSED_ATTENTION, PACKAGE_ATTENTION
from megalaunch.schema import RunSpec
from megalaunch.schema.model import AttentionBackend, ModelSpec

DENSE_MASK_TOKENS = 2048
"""Samples of up to so many tokens have a dense mask: one kernel then takes less time than many small blocks. In longer
samples only the blocks of queries and keys that see each other are multiplied."""


@dataclass(frozen=True)
class BackendFacts:
    """What a backend computes.

    Attributes:
        meaning: the kernel, in words.
        any_device: it runs on every platform; else on those of which `FUSED_ATTENTION` says so.
        gpu_16_bits_only: on a GPU it takes bf16 and fp16 only.
        head_sizes: the smallest and the largest head on a GPU; None: any.
        masks: sliding windows and packed documents: "any", up to `DENSE_MASK_TOKENS` ("dense"), or none.
        soft_cap, sinks, dropout: the score modifications that it computes.
        exchanges: the values of parallel.cp_comm_type that it works with.
        masked_exchanges: those of them that it works with in sliding windows and packed documents; None: all.
        deterministic: it has a deterministic backward pass on a GPU.
        package: it is of another package, and auto never takes it.
        nvidia_only: it has no kernels for other chips that torch calls cuda.
        capability: the least CUDA compute capability that it has kernels for; None: any.
    """

    meaning: str
    any_device: bool = False
    gpu_16_bits_only: bool = False
    head_sizes: tuple[int, int | None] = (1, None)
    masks: str = "any"
    soft_cap: bool = False
    sinks: bool = False
    dropout: bool = False
    exchanges: tuple[str, ...] = ("a2a",)
    masked_exchanges: tuple[str, ...] | None = None
    deterministic: bool = True
    package: bool = False
    nvidia_only: bool = False
    capability: float | None = None


AMPERE = 8.0
"""The compute capability from which on NVIDIA GPUs have flash attention."""
_ALL_EXCHANGES = ("p2p", "a2a", "allgather", "a2a+p2p")
# Limits of the operators: torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and its FlexAttention; those of
# flash-attn: csrc/flash_attn/flash_api.cpp and hopper/flash_api.cpp of its 2.8 sources.
BACKENDS: Mapping[AttentionBackend, BackendFacts] = MappingProxyType(
    {
        "flash": BackendFacts(
            "torch's flash attention, by blocks of the mask",
            gpu_16_bits_only=True,
            head_sizes=(1, 256),
            sinks=True,
            exchanges=_ALL_EXCHANGES,
            capability=AMPERE,
        ),
        "cudnn": BackendFacts(
            "torch's call of cuDNN",
            gpu_16_bits_only=True,
            head_sizes=(1, 128),
            masks="none",
            deterministic=False,
            capability=AMPERE,
        ),
        "efficient": BackendFacts("torch's memory-efficient attention, keys repeated for each head", masks="dense"),
        "flex": BackendFacts(
            "torch's FlexAttention, compiled",
            head_sizes=(16, None),
            soft_cap=True,
            sinks=True,
            dropout=True,
            exchanges=_ALL_EXCHANGES,
        ),
        "math": BackendFacts(
            f"operator by operator: all scores held, above {DENSE_MASK_TOKENS:,} tokens by blocks of queries in fp32",
            any_device=True,
            soft_cap=True,
            sinks=True,
            dropout=True,
            exchanges=_ALL_EXCHANGES,
        ),
        "flash_attn": BackendFacts(
            "package flash-attn",
            gpu_16_bits_only=True,
            head_sizes=(1, 256),
            soft_cap=True,
            exchanges=("a2a", "allgather"),
            package=True,
            capability=AMPERE,
        ),
        "te": BackendFacts(
            "Transformer Engine's DotProductAttention",
            gpu_16_bits_only=True,
            head_sizes=(1, 256),
            exchanges=_ALL_EXCHANGES,
            masked_exchanges=("a2a", "allgather"),
            package=True,
            nvidia_only=True,
            capability=AMPERE,
        ),
    }
)
"""The backends by name; `auto` selects among torch's kernels by device, dtype and mask, and computes everything."""


def serving_backends(device: str) -> tuple[AttentionBackend, ...]:
    """Return the backends that run on a device type, auto first."""
    return ("auto", *(name for name in BACKENDS if runs_on(name, device)))


def runs_on(name: AttentionBackend, device: str) -> bool:
    """Return whether a backend runs on a device type."""
    facts = BACKENDS[name]
    return facts.any_device or name in (PACKAGE_ATTENTION if facts.package else FUSED_ATTENTION).get(device, ())


def has_kernels_for(facts: BackendFacts, chip: ChipFacts) -> bool:
    """Return whether a backend has kernels for the chip's compute capability; True where that is unknown."""
    return facts.capability is None or chip.capability is None or chip.capability >= facts.capability


def device_of(spec: RunSpec) -> str | None:
    """Return the device type of the spec's chip; None: unknown."""
    chip = CHIPS.get(spec.platform.chip)
    return None if chip is None else chip.device


def head_size(model: ModelSpec) -> int:
    """Return the width of a query head."""
    if model.mla.kv_lora_rank is not None:
        return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    return model.head_dim or model.hidden_size // model.num_attention_heads


def exchanges(spec: RunSpec) -> set[str]:
    """Return the communication types of context parallelism in any layer.

    Dynamic context parallelism asks of a kernel what an all-gather does: queries over all keys that they see.
    """
    if spec.parallel.dynamic_context_parallel:
        return {"allgather"}
    given = spec.parallel.cp_comm_type
    return {*given} if isinstance(given, tuple) else {given}


def has_library_ring(spec: RunSpec) -> bool:
    """Return whether a ring of context parallelism is Transformer Engine's, not the engine's own."""
    ring = not {"p2p", "a2a+p2p"}.isdisjoint(exchanges(spec))
    return spec.model.attention_backend == "te" and spec.parallel.cp > 1 and ring
