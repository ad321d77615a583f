"""The Triton kernels of geglu.py; imported only where Triton is installed and the kernels are used.

The tanh approximation 0.5 x (1 + tanh(u)) is computed as x sigmoid(2 u), which is equal and has the form of quick GELU.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements per program
_EXACT = tl.constexpr(0)
_TANH = tl.constexpr(1)
_QUICK = tl.constexpr(2)
_VARIANTS = {"geglu": _EXACT.value, "geglu_tanh": _TANH.value, "quick_geglu": _QUICK.value}
_SLOPE = tl.constexpr(1.702)  # QUICK_GELU_SLOPE of geglu.py
_TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))  # of 2 u = slope (x + cubic x^3)
_TANH_CUBIC = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))  # of the normal distribution, at 0


@triton.jit
def _gelu(x, VARIANT: tl.constexpr):
    """Return s(x) with gelu(x) = x s(x), and x s'(x)."""
    if VARIANT == _EXACT:
        share = 0.5 * (1 + tl.erf(x * _ROOT_HALF))
        return share, x * _DENSITY * tl.exp(-0.5 * x * x)
    elif VARIANT == _TANH:
        cubic = x * x * _TANH_CUBIC
        share = tl.sigmoid(x * _TANH_SLOPE * (1 + cubic))
        return share, x * share * (1 - share) * _TANH_SLOPE * (1 + 3 * cubic)
    else:
        share = tl.sigmoid(x * _SLOPE)
        return share, x * share * (1 - share) * _SLOPE


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, size, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if VARIANT == _QUICK:
        up += 1
    share, _ = _gelu(gate, VARIANT)
    tl.store(out_ptr + at, gate * share * up, mask=inside)


@triton.jit
def _backward(d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, size, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    d_out = tl.load(d_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if VARIANT == _QUICK:
        up += 1
    share, change = _gelu(gate, VARIANT)
    tl.store(d_gate_ptr + at, d_out * up * (share + change), mask=inside)
    tl.store(d_up_ptr + at, d_out * gate * share, mask=inside)


def forward(gate: Tensor, up: Tensor, variant: str) -> Tensor:
    """Return gelu(gate) * up, contiguous; arithmetic in fp32 whatever the dtype."""
    out = gate.new_empty(gate.shape)
    _forward[_programs(gate)](
        gate.contiguous(), up.contiguous(), out, gate.numel(), VARIANT=_VARIANTS[variant], BLOCK=_BLOCK
    )
    return out


def backward(d_out: Tensor, gate: Tensor, up: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous, given that of the output."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    inputs = (x.contiguous() for x in (d_out, gate, up))
    _backward[_programs(gate)](*inputs, d_gate, d_up, gate.numel(), VARIANT=_VARIANTS[variant], BLOCK=_BLOCK)
    return d_gate, d_up


def _programs(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), _BLOCK),)
