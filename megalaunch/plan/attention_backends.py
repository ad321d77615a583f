"""What each value of `model.attention_backend` computes, as data: devices, dtypes, head sizes, masks, determinism.

The rules of plan/rules/attention_backend.py refuse the rest before a run starts; the engine's forms are in
engine/model/attention/backends.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megalaunch.plan.layers import list_layers
from megalaunch.plan.topology import most_common_cp_comm_type
from megalaunch.platform.chips import CHIPS, ChipFacts
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


_AMPERE = 8.0
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
            capability=_AMPERE,
        ),
        "cudnn": BackendFacts(
            "torch's call of cuDNN",
            gpu_16_bits_only=True,
            head_sizes=(1, 128),
            masks="none",
            deterministic=False,
            capability=_AMPERE,
        ),
        "efficient": BackendFacts("torch's memory-efficient attention, keys repeated for each head", masks="dense"),
        "flex": BackendFacts(
            "torch's FlexAttention, compiled",
            head_sizes=(16, None),
            soft_cap=True,
            sinks=True,
            exchanges=("a2a", "allgather"),
        ),
        "math": BackendFacts(
            "operator by operator: all scores are held and their weights saved",
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
            capability=_AMPERE,
        ),
        "te": BackendFacts(
            "Transformer Engine's DotProductAttention",
            gpu_16_bits_only=True,
            head_sizes=(1, 256),
            exchanges=_ALL_EXCHANGES,
            masked_exchanges=("a2a", "allgather"),
            package=True,
            nvidia_only=True,
            capability=_AMPERE,
        ),
    }
)
"""The backends by name; `auto` selects among torch's kernels by device, dtype and mask, and computes everything."""


def serving_backends(device: str) -> tuple[AttentionBackend, ...]:
    """Return the backends that run on a device type, auto first."""
    return ("auto", *(name for name in BACKENDS if _runs_on(name, device)))


def _runs_on(name: AttentionBackend, device: str) -> bool:
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


AutoKernel = Literal["torch", "dense_mask", "flash_blocks", "fp32_blocks", "cpu"]
"""What `auto` takes: torch's operator, the same with a dense mask, blocks by flash attention or with fp32 scores, or
that of a CPU."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that `auto` takes, and why."""

    kernel: AutoKernel
    reason: str


def computes_scores(model: ModelSpec, whole_samples: bool, length: int) -> bool:
    """Return whether `auto` computes the scores of a model in fp32, because the model modifies them.

    Sinks join the log-sum-exp by which blocks are merged. Short samples have no blocks, and torch's operator no sinks.

    Args:
        model: the model.
        whole_samples: a rank attends over all tokens of a sample: without cp, and after an all-to-all.
        length: the tokens of a sample.
    """
    if model.attn_logit_softcapping is not None or model.attention_dropout > 0:
        return True
    return model.attention_sinks and whole_samples and length <= DENSE_MASK_TOKENS


def choose_kernel(spec: RunSpec, window: int | None) -> KernelChoice:
    """Return what `auto` takes for layers with this sliding window (None: full attention)."""
    model, length = spec.model, spec.batch.sequence_length
    blocks: AutoKernel = "flash_blocks" if _has_flash(spec) else "fp32_blocks"
    masked = spec.data.reset_attention_mask or (window or length) < length
    whole = spec.parallel.cp == 1 or most_common_cp_comm_type(spec.parallel) == "a2a"
    if computes_scores(model, whole, length):
        only_sinks = model.attn_logit_softcapping is None and not model.attention_dropout
        short = f"torch's operator has no sinks, and samples have at most {DENSE_MASK_TOKENS:,} tokens"
        return KernelChoice(
            "fp32_blocks", short if only_sinks else "fused kernels have no soft cap, and other dropout masks"
        )
    if not whole:
        return KernelChoice(blocks, "context parallelism merges them by their log-sum-exp")
    if model.attention_sinks:
        return KernelChoice(blocks, f"sinks in samples above {DENSE_MASK_TOKENS:,} tokens")
    if masked and length > DENSE_MASK_TOKENS:
        return KernelChoice(blocks, f"documents or windows in samples above {DENSE_MASK_TOKENS:,} tokens")
    if masked:
        return KernelChoice("dense_mask", f"samples have at most {DENSE_MASK_TOKENS:,} tokens")
    if device_of(spec) == "cpu":
        return KernelChoice("cpu", "by dtype and length: the faster on a CPU")
    return KernelChoice("torch", _torch_kernels(spec))


def _torch_kernels(spec: RunSpec) -> str:
    """Return among which kernels torch's operator selects on the spec's chip."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is not None and not has_kernels_for(BACKENDS["flash"], chip):
        return f"memory-efficient; flash and cuDNN need compute capability {_AMPERE}"
    return "flash, cuDNN or memory-efficient, in torch's order of preference"


_KERNELS: Mapping[AutoKernel, str] = MappingProxyType(
    {
        "torch": "torch's operator",
        "dense_mask": "torch's operator with a dense mask",
        "flash_blocks": "blocks of flash attention",
        "fp32_blocks": "blocks with scores in fp32",
        "cpu": "kernels/causal_attention.py, or torch's flash attention",
    }
)


def has_library_ring(spec: RunSpec) -> bool:
    """Return whether a ring of context parallelism is Transformer Engine's, not the engine's own."""
    given = spec.parallel.cp_comm_type
    kinds = given if isinstance(given, tuple) else (given,)
    return spec.model.attention_backend == "te" and spec.parallel.cp > 1 and not {"p2p", "a2a+p2p"}.isdisjoint(kinds)


def describe_auto(device: str) -> str:
    """Return among which kernels `auto` selects on a device type, in one sentence."""
    kernels: tuple[AutoKernel, ...] = ("cpu",) if device == "cpu" else ("torch", "dense_mask")
    kernels += ("flash_blocks", "fp32_blocks") if _runs_on("flash", device) else ("fp32_blocks",)
    return f"{'; '.join(_KERNELS[kernel] for kernel in kernels)}: by mask, dtype and length, never of another package"


def describe_backend(spec: RunSpec) -> str:
    """Return which kernel of attention a run takes, and why, in one sentence; of windows and full attention if two."""
    if spec.model.attention_backend != "auto":
        return f"{BACKENDS[spec.model.attention_backend].meaning}: chosen by model.attention_backend"
    windows = {layer.window for layer in list_layers(spec.model)}
    by_window = {window: choose_kernel(spec, window) for window in windows}
    if len(set(by_window.values())) == 1:
        return _describe_choice(by_window[windows.pop()])
    full = _describe_choice(by_window.pop(None))
    return "; ".join((*map(_describe_choice, by_window.values()), f"in layers without a window {full}"))


def _describe_choice(choice: KernelChoice) -> str:
    separator = ", " if choice.kernel == "cpu" else ": "
    return f"{_KERNELS[choice.kernel]}{separator}{choice.reason}"


def _has_flash(spec: RunSpec) -> bool:
    """Return whether blocks have a flash kernel: on CPUs always, on GPUs from Ampere on in 16 bits."""
    flash, device = BACKENDS["flash"], device_of(spec)
    if device is None or not _runs_on("flash", device) or not has_kernels_for(flash, CHIPS[spec.platform.chip]):
        return False
    fits = head_size(spec.model) <= (flash.head_sizes[1] or 0) and spec.precision.compute_dtype != "fp32"
    return device == "cpu" or fits
