"""The default implementation of each operator on a kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from megalaunch.platform.overrides import active_overrides
from megalaunch.platform.platforms import TRITON_DEVICES

_SDPA = "torch's scaled_dot_product_attention"
_KERNELS = "megalaunch.kernels"
_ATTENTION = "megalaunch.engine.model.attention"


@dataclass(frozen=True)
class Implementation:
    """An operator, and the module or function that implements it."""

    operator: str
    implementation: str


def implementations(device: str) -> Iterator[Implementation]:
    """Yield the operators on a device type ("cpu", or torch's name of an accelerator), first those that are overridden.

    Raises:
        OverrideError: Overrides cannot be loaded, or contradict each other.
    """
    for row in active_overrides(device).values():
        yield Implementation(f"{row.target}, overridden", str(row))
    if device == "cpu":
        yield Implementation(
            "causal attention",
            f"{_KERNELS}.causal_attention; bf16 with a bf16 unit and long fp32 samples: {_SDPA}",
        )
    else:
        yield Implementation(
            "causal attention", f"{_SDPA}: flash, memory-efficient or cuDNN kernels, selected by torch"
        )
    if device == "cuda":
        yield Implementation(
            "attention of windows and packed documents in 16 bits (NVIDIA; no ring)", "torch's varlen_attn"
        )
        flex = "attention in 16 bits with a soft cap, or with sinks (no ring)"
        yield Implementation(flex, "torch's flex_attention")
    yield Implementation("attention with a window or documents in short samples", f"{_SDPA} with a mask")
    scores = f"{_ATTENTION}.online_softmax, fp32 scores"
    flash = {"cpu": "flash attention", "cuda": f"flash attention in 16 bits; in fp32 {scores}"}
    blocks = "attention by blocks (cp; windows, documents and sinks in long samples)"
    yield Implementation(blocks, flash.get(device, scores))
    capped = "a soft cap in fp32" if device == "cuda" else "a soft cap"
    yield Implementation(f"attention with {capped} or dropout, or sinks in short samples", scores)
    has_triton = device in TRITON_DEVICES and find_spec("triton") is not None
    form = "_triton" if has_triton else ", in torch"
    yield Implementation("SwiGLU", f"{_KERNELS}.swiglu{form}")
    yield Implementation("GEGLU", f"{_KERNELS}.geglu{form}")
    yield Implementation("casts to fp8", f"{_KERNELS}.float8_cast{form}")
    yield Implementation("permutation of tokens by expert", f"{_KERNELS}.permute{form}")
    yield Implementation("matmuls of experts", f"{_KERNELS}.grouped_linear: torch's grouped_mm, or a loop over experts")
    if device == "cpu":
        yield Implementation("RMSNorm", f"{_KERNELS}.rms_norm")
        yield Implementation("matmuls in bf16", f"{_KERNELS}.matmul: in fp32 without a bf16 unit, else torch")
        yield Implementation("matmuls of a few rows in generation", f"{_KERNELS}.small_batch_linear")
        yield Implementation("cross-entropy", f"{_KERNELS}.cross_entropy")
        yield Implementation("gradient norm", f"{_KERNELS}.tensor_norms")
        yield Implementation("LayerNorm, RoPE and other matmuls", "torch")
    elif has_triton:
        yield Implementation("RMSNorm, LayerNorm and the residual addition before them", f"{_KERNELS}.add_norm_triton")
        yield Implementation("RoPE", f"{_KERNELS}.rope_triton")
        yield Implementation("cross-entropy", f"{_KERNELS}.linear_loss_triton")
        yield Implementation("updates by Lion, and by AdamW in half formats", f"{_KERNELS}.fused_update_triton")
        yield Implementation("matmuls", "torch")
    else:
        yield Implementation("matmuls, norms, RoPE and cross-entropy", "torch")
