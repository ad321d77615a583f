"""Which kernel of attention a run takes, and why: for the engine, the planner, the log of a run, and doctor.

What each backend computes is in attention_backends.py. `auto` takes kernels of torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from megalaunch.plan.attention_backends import (
    AMPERE,
    BACKENDS,
    DENSE_MASK_TOKENS,
    BackendFacts,
    device_of,
    exchanges,
    has_kernels_for,
    head_size,
    runs_on,
)
from megalaunch.plan.layers import list_layers
from megalaunch.plan.topology import most_common_cp_comm_type
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec
from megalaunch.schema.model import AttentionBackend, ModelSpec

TakenBackend = AttentionBackend | Literal["varlen"]
"""What the engine is built with: a value of `model.attention_backend`, or torch's varlen_attn, flash attention of
packed documents and sliding windows in one call, which serves `flash` and `auto`."""

RUN_BACKENDS: frozenset[TakenBackend] = frozenset({"flash_attn", "te", "varlen"})
"""The backends of which a call computes contiguous queries over all of their keys, documents by their lengths."""

_FLEX_OF_AUTO = replace(BACKENDS["flex"], gpu_16_bits_only=True, head_sizes=(16, 256), capability=AMPERE)
_FLEX_WITHOUT_RING = replace(_FLEX_OF_AUTO, exchanges=("a2a", "allgather"))
_VARLEN = BackendFacts(
    "torch's flash attention of windows and packed documents in one call",
    gpu_16_bits_only=True,
    head_sizes=(1, 256),
    exchanges=("a2a", "allgather"),
    nvidia_only=True,
    capability=AMPERE,
)


@dataclass(frozen=True)
class TakenBackends:
    """The backends that the engine is built with, by kind of layer.

    Attributes:
        full: of layers without a sliding window.
        windowed: of layers with one; None: the same.
    """

    full: TakenBackend = "auto"
    windowed: TakenBackend | None = None

    def of(self, window: int | None) -> TakenBackend:
        """Return the backend of layers with this window (None: full attention)."""
        return self.full if window is None or self.windowed is None else self.windowed

    @property
    def all(self) -> frozenset[TakenBackend]:
        """The backends of any layer."""
        return frozenset({self.full, self.windowed or self.full})


def taken_backends(spec: RunSpec) -> TakenBackends:
    """Return the backends that the layers of a run are built with."""
    by_window = {layer.window: taken_backend(spec, layer.window) for layer in list_layers(spec.model)}
    windowed = next((backend for window, backend in by_window.items() if window is not None), None)
    return TakenBackends(by_window.get(None, windowed or "auto"), windowed)


def taken_backend(spec: RunSpec, window: int | None) -> TakenBackend:
    """Return the backend of layers with this window (None: full): on GPUs `auto` and `flash` may mean another.

    A ring merges blocks by their log-sum-exp. varlen_attn has no gradient of it, and FlexAttention computes its forward
    pass once more for it: blocks of flash attention are faster, where neither caps nor dropout modify the scores.
    """
    model, backend = spec.model, spec.model.attention_backend
    if backend not in ("auto", "flash"):
        return backend
    masked = spec.data.reset_attention_mask or _is_windowed(spec, window)
    capped = model.attn_logit_softcapping is not None or model.attention_dropout > 0
    modified = capped or model.attention_sinks
    if masked and not modified and _is_served(spec, _VARLEN):
        return "varlen"
    flex = _FLEX_OF_AUTO if capped else _FLEX_WITHOUT_RING
    if backend == "auto" and (masked or modified) and _is_served(spec, flex):
        return "flex"
    return backend


def _is_windowed(spec: RunSpec, window: int | None) -> bool:
    """Return whether a window hides tokens of a sample."""
    return window is not None and window < spec.batch.sequence_length


def _is_served(spec: RunSpec, facts: BackendFacts) -> bool:
    """Return whether a kernel that torch has where it has FlexAttention serves a run's chip, dtype, heads and cp."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or not runs_on("flex", chip.device) or not has_kernels_for(facts, chip):
        return False
    if spec.precision.compute_dtype == "fp32" or (facts.nvidia_only and not chip.is_nvidia):
        return False
    smallest, largest = facts.head_sizes
    if not smallest <= head_size(spec.model) <= (largest or head_size(spec.model)):
        return False
    return spec.parallel.cp == 1 or exchanges(spec) <= {*facts.exchanges}


AutoKernel = Literal["torch", "dense_mask", "flash_blocks", "fp32_blocks", "flex", "varlen", "cpu"]
"""What `auto` takes: torch's operator, the same with a dense mask, blocks by flash attention or with fp32 scores,
FlexAttention, flash attention of windows and documents in one call, or that of a CPU."""


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
    match taken_backend(spec, window):
        case "flex":
            return KernelChoice("flex", _why_flex(model))
        case "varlen":
            hidden = "of two documents" if spec.data.reset_attention_mask else "outside of the window"
            return KernelChoice("varlen", f"computes no pairs {hidden}")
    blocks: AutoKernel = "flash_blocks" if _has_flash(spec) else "fp32_blocks"
    masked = spec.data.reset_attention_mask or _is_windowed(spec, window)
    whole = spec.parallel.cp == 1 or most_common_cp_comm_type(spec.parallel) == "a2a"
    if computes_scores(model, whole, length):
        return KernelChoice("fp32_blocks", _why_scores(model))
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


def _why_flex(model: ModelSpec) -> str:
    if model.attention_dropout > 0:
        return "takes dropout masks that are the same in every layout, in two calls"
    if model.attn_logit_softcapping is not None:
        return "computes soft caps, which no other fused kernel of torch does"
    if model.attention_sinks:
        return "returns the log-sum-exp, which sinks join, and skips hidden blocks"
    return "skips the blocks that a window or documents hide"


def _why_scores(model: ModelSpec) -> str:
    modified = "soft caps" if model.attention_dropout == 0 else "these dropout masks"
    if model.attn_logit_softcapping is not None or model.attention_dropout > 0:
        return f"FlexAttention, which has {modified}, does not serve this device, dtype or head size"
    return f"torch's operator has no sinks, and samples have at most {DENSE_MASK_TOKENS:,} tokens"


def _torch_kernels(spec: RunSpec) -> str:
    """Return among which kernels torch's operator selects on the spec's chip."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is not None and not has_kernels_for(BACKENDS["flash"], chip):
        return f"memory-efficient; flash and cuDNN need compute capability {AMPERE}"
    if prefers_cudnn(spec):
        return "cuDNN, which torch prefers on this chip from version 9.15.1 on, else flash"
    return "flash, cuDNN or memory-efficient, in torch's order of preference"


def prefers_cudnn(spec: RunSpec) -> bool:
    """Return whether torch's operator takes cuDNN first for causal attention: on compute capability 9 and 10.

    As torch's check_prefer_cudnn_attention does, which asks for cuDNN 9.15.1 besides: older ones compute some lengths
    wrongly. cuDNN has no deterministic backward pass.
    """
    chip, dtype = CHIPS.get(spec.platform.chip), spec.precision.compute_dtype
    if chip is None or chip.capability is None or dtype == "fp32" or spec.train.deterministic:
        return False
    width, (_, widest) = head_size(spec.model), BACKENDS["cudnn"].head_sizes
    return 9 <= chip.capability < 11 and width <= (widest or width) and width % 8 == 0


_KERNELS: Mapping[AutoKernel, str] = MappingProxyType(
    {
        "torch": "torch's operator",
        "dense_mask": "torch's operator with a dense mask",
        "flash_blocks": "blocks of flash attention",
        "fp32_blocks": "blocks with scores in fp32",
        "flex": BACKENDS["flex"].meaning,
        "varlen": _VARLEN.meaning,
        "cpu": "kernels/causal_attention.py, or torch's flash attention",
    }
)


def describe_auto(device: str) -> str:
    """Return among which kernels `auto` selects on a device type, in one sentence."""
    kernels: tuple[AutoKernel, ...] = ("cpu",) if device == "cpu" else ("torch", "dense_mask")
    kernels += ("varlen", "flex") if runs_on("flex", device) else ()
    kernels += ("flash_blocks", "fp32_blocks") if runs_on("flash", device) else ("fp32_blocks",)
    return f"{'; '.join(_KERNELS[kernel] for kernel in kernels)}: by mask, dtype and length, never of another package"


def describe_backend(spec: RunSpec) -> str:
    """Return which kernel of attention a run takes, and why, in one sentence; of windows and full attention if two."""
    backend = spec.model.attention_backend
    if backend != "auto":
        taken = sorted(taken_backends(spec).all)
        meanings = (_VARLEN.meaning if name == "varlen" else BACKENDS[name].meaning for name in taken if name != "auto")
        return f"{', '.join(meanings)}: chosen by model.attention_backend"
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
    if device is None or not runs_on("flash", device) or not has_kernels_for(flash, CHIPS[spec.platform.chip]):
        return False
    fits = head_size(spec.model) <= (flash.head_sizes[1] or 0) and spec.precision.compute_dtype != "fp32"
    return device == "cpu" or fits
