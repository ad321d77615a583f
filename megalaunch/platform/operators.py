"""The default implementation of each operator on a kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

_SDPA = "torch's scaled_dot_product_attention"
_OTHERS = "matmuls, norms, rotary positions, softmax and loss"


@dataclass(frozen=True)
class Implementation:
    """An operator, and the module or function that implements it."""

    operator: str
    implementation: str


def implementations(device: str) -> Iterator[Implementation]:
    """Yield the operators on a device type ("cpu", or torch's name of an accelerator)."""
    if device == "cpu":
        yield Implementation(
            "causal attention",
            f"megalaunch.kernels.causal_attention; bf16 with a bf16 unit and long fp32 samples: {_SDPA}",
        )
    else:
        yield Implementation(
            "causal attention", f"{_SDPA}: flash, memory-efficient or cuDNN kernels, as torch finds them fit"
        )
    yield Implementation("attention with a window or documents", f"{_SDPA} with a mask")
    yield Implementation("attention with sinks, soft cap or dropout", "megalaunch.engine.model.attention.blockwise")
    if device == "cuda" and find_spec("triton") is not None:
        yield Implementation("SwiGLU", "megalaunch.kernels.swiglu_triton")
    else:
        yield Implementation("SwiGLU", "megalaunch.kernels.swiglu, in torch")
    yield Implementation(_OTHERS, "torch")
