"""Emulate on fake CPU tensors the operators that need values, or behave differently on a GPU.

torch cannot place tensors, not even fake ones, on a device that it was built without. So kernels are told that they are
not on a CPU (`kernels/forms.py`). For Triton kernels torch's operators of them are called, whose rules for fake tensors
allocate their results. Other operators that have a fused kernel only on GPUs are overridden by functions that allocate
and save for backward the same tensors as that kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function, apply_tuple_function
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.fsdp import fsdp_modules
from megalaunch.engine.torch_private import set_default_reduce_scatter
from megalaunch.kernels import float8_cast, fused_update, linear_loss, permute
from megalaunch.kernels.forms import BlockKernel, KernelForms
from megalaunch.kernels.geglu import geglu_fused
from megalaunch.kernels.rms_norm import rms_norm_fused
from megalaunch.kernels.swiglu import swiglu_fused


def use_gpu_reduce_scatter(model: ModelParts) -> None:
    """Give the FSDP units FSDP2's default reduce-scatter, instead of the one for gloo."""
    for unit in (unit for part in model.parts for unit in fsdp_modules(part)):
        set_default_reduce_scatter(unit)


class NoCopyOffload:
    """An offloaded tensor: it takes no device memory until it is fetched."""

    def __init__(self, flat: Tensor) -> None:
        self._shape, self._dtype = flat.shape, flat.dtype
        self._back: Tensor | None = None

    def fetch(self) -> None:
        """Allocate a device tensor of the same shape and dtype."""
        if self._back is None:
            self._back = torch.empty(self._shape, dtype=self._dtype)

    def wait(self) -> Tensor:
        """Return the fetched tensor and drop the reference to it."""
        self.fetch()
        assert self._back is not None, "fetch sets it"
        back, self._back = self._back, None
        return back


class NoHostCopies:
    """Host memory of a simulated GPU: whatever is in it is empty, and so takes no device memory."""

    def zeros_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a state without elements."""
        return torch.empty(0, dtype=dtype)

    def send(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Copy nothing."""

    def receive(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a weight and a gradient without elements."""
        return torch.empty(0), torch.empty(0)

    def send_back(self, name: str, weight: Tensor) -> None:
        """Copy nothing."""

    def finish(self) -> None:
        """Wait for nothing."""


class _RMSNorm(torch.autograd.Function):
    """Fused RMSNorm: saves its inputs and 1 / rms of each row in fp32 for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return apply_function(_RMSNorm, x, weight)


class _FlashAttention(torch.autograd.Function):
    """Flash attention: saves q, k, v, the output and the log-sum-exp of each row for backward (Dao 2023).

    Backward accumulates dq in fp32, and computes dk and dv per query head before summing them over groups.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out, log_sum = _flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, log_sum, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, log_sum, _ = ctx.saved_tensors
        return *_flash_backward(q, k, v, gradients[0], log_sum), None


class _FlexAttention(torch.autograd.Function):
    """FlexAttention with its log-sum-exp: saves what flash attention does (torch's flex_attention.py)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum = _flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, log_sum, *read)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, log_sum, *read = ctx.saved_tensors
        return *_flash_backward(q, k, v, gradients[0], log_sum), *(None for _ in read)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, read: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out, log_sum = apply_tuple_function(_FlexAttention, q, k, v, *read)
    return out, log_sum


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output, token-major in memory, and the log-sum-exp."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _flash_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what the kernel does, and return the gradients."""
    dout = dout.contiguous()
    dq_sum, share = torch.empty_like(q, dtype=torch.float32), torch.empty_like(log_sum)
    dq = torch.empty_like(q)
    dk, dv = (x.new_empty((*q.shape[:2], *x.shape[2:])) for x in (k, v))
    del dout, dq_sum, share
    if k.shape[1] != q.shape[1]:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    return dq, dk, dv


_FLASH_BLOCK = BlockKernel(
    supports=lambda q, head_dim: True,
    forward=lambda q, k, v, causal, scale: _flash_forward(q, k, v),
    backward=lambda q, k, v, out, dout, log_sum, causal, scale: _flash_backward(q, k, v, dout, log_sum),
)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    bias = None if mask is None else mask.to(q.dtype)  # fused kernels add the mask in the dtype of the scores
    return apply_function(_FlashAttention, q, k, v, bias)


def _grouped_matmul(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Allocate the output only: the operator refuses fake tensors in fp32, and a loop over experts needs their rows."""
    if b.ndim == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(offsets_E.shape[0], a.shape[0], b.shape[1])


CPU_KERNELS = KernelForms(grouped_matmul=_grouped_matmul)
"""The operators of a simulated CPU, for `use_kernel_forms`."""
GPU_KERNELS = replace(
    CPU_KERNELS,
    on_cpu=False,
    rms_norm=rms_norm_fused,
    attention=_attention,
    block_attention=_FLASH_BLOCK,
    flex_attention=_flex_attention,
    swiglu=swiglu_fused,
    geglu=geglu_fused,
    row_kernels=permute.triton_kernels(),
    cast_kernels=float8_cast.triton_kernels(),
    loss_kernels=linear_loss.triton_kernels(),
    update_kernels=fused_update.triton_kernels(),
)
"""The operators of a simulated GPU."""
KERNELS_WITHOUT_TRITON = replace(
    GPU_KERNELS,
    rms_norm=_rms_norm,
    swiglu=None,
    geglu=None,
    cast_kernels=None,
    loss_kernels=None,
    update_kernels=None,
)
"""The operators of a simulated accelerator for which the engine has no Triton kernels."""
