"""The Triton kernels of swiglu.py; imported only where Triton is installed and the kernels are used."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements per program


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    d_out = tl.load(d_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(d_gate_ptr + at, d_out * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(d_up_ptr + at, d_out * gate * sigmoid, mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous; arithmetic in fp32 whatever the dtype."""
    out = gate.new_empty(gate.shape)
    _forward[_programs(gate)](gate.contiguous(), up.contiguous(), out, gate.numel(), BLOCK=_BLOCK)
    return out


def backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous, given that of the output."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    inputs = (x.contiguous() for x in (d_out, gate, up))
    _backward[_programs(gate)](*inputs, d_gate, d_up, gate.numel(), BLOCK=_BLOCK)
    return d_gate, d_up


def _programs(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), _BLOCK),)
