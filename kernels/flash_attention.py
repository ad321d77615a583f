"""Flash attention of one block of queries and keys, by torch's kernels for CPU and CUDA.

They are private operators of torch (2.13); a torch without them raises an AttributeError here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.kernels.forms import BlockKernel

# Flash attention with its log-sum-exp, by which blocks of keys are merged. `F.scaled_dot_product_attention` does not
# return it, and torch's own ring attention takes no documents and no windows.
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_FLASH_CUDA_MAX_HEAD_DIM = 256


def _supports_flash_cpu(q: Tensor, head_dim: int) -> bool:
    return q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, log_sum = _FLASH_CPU(q, k, v, 0.0, causal, scale=scale)
    return out, log_sum


def _flash_cpu_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _FLASH_CPU_BACKWARD(dout, q, k, v, out, log_sum, 0.0, causal, scale=scale)
    return dq, dk, dv


def _supports_flash_cuda(q: Tensor, head_dim: int) -> bool:
    narrow = q.dtype in (torch.bfloat16, torch.float16) and head_dim <= _FLASH_CUDA_MAX_HEAD_DIM
    return narrow and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, log_sum, *_ = _FLASH_CUDA(q, k, v, 0.0, causal, False, scale=scale)
    return out, log_sum


def _flash_cuda_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = None, None, q.shape[2], k.shape[2]  # None: all rows of the batch have these lengths
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    dq, dk, dv = _FLASH_CUDA_BACKWARD(dout, q, k, v, out, log_sum, *lengths, 0.0, causal, unused, unused, scale=scale)
    return dq, dk, dv


FLASH_KERNELS = {
    "cpu": BlockKernel(_supports_flash_cpu, _flash_cpu, _flash_cpu_backward),
    "cuda": BlockKernel(_supports_flash_cuda, _flash_cuda, _flash_cuda_backward),
}
"""Fused attention of a block, by device type."""
