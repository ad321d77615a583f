"""The Triton kernels of linear_loss.py; imported only where Triton is installed and the kernels are used.

A program computes one row. It needs two passes over its logits: one for their maximum and the sum of exponentials,
updated together (Milakov and Gimelshein 2018), and one that writes each gradient over its logit. Where one kernel does
both, the second pass finds most of the row in the L2 cache: one or two rows a multiprocessor are in flight.
Shapes: T tokens, v a rank's shard of the vocabulary. Arithmetic in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 8192  # logits that a program holds: 8 a thread, one load of 16 bytes in half formats


@triton.jit
def _load(row_ptr, at, used, cap, CAPPED: tl.constexpr):
    """Return the logits at some columns, capped if there is a cap, and t = tanh(z / cap); -inf behind the used ones."""
    logit = tl.load(row_ptr + at, mask=at < used, other=0.0).to(tl.float32)
    tanh = 0.0
    if CAPPED:
        tanh = 2 * tl.sigmoid(2 * logit / cap) - 1
        logit = cap * tanh
    return tl.where(at < used, logit, float("-inf")), tanh


@triton.jit
def _sum_row(row_ptr, used, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Return m = max_v z_v and sum_v exp(z_v - m); -inf and 0 without columns."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, used, BLOCK):
        logit, _ = _load(row_ptr, start + tl.arange(0, BLOCK), used, cap, CAPPED)
        larger = tl.maximum(largest, tl.max(logit))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit - larger))
        largest = larger
    return largest, total


@triton.jit
def _write_gradient(row_ptr, column, log_sum, d_loss, width, used, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Write dz_v = (exp(z_v - log_sum) - [v = column]) dloss over the row, times 1 - t^2 if there is a cap."""
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit, tanh = _load(row_ptr, at, used, cap, CAPPED)
        gradient = (tl.exp(logit - log_sum) - tl.where(at == column, 1.0, 0.0)) * d_loss
        if CAPPED:
            gradient *= 1 - tanh * tanh
        tl.store(row_ptr + at, gradient, mask=at < width)


@triton.jit
def _label_logit(row_ptr, column, used, cap, CAPPED: tl.constexpr):
    """Return the capped logit of a column; 0 if there is none."""
    logit, _ = _load(row_ptr, tl.maximum(column, 0), used, cap, CAPPED)
    return tl.where(column >= 0, logit, 0.0)


@triton.jit
def _sums(logits_ptr, columns_ptr, sums_ptr, stride, used, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row_ptr = logits_ptr + row * stride
    largest, total = _sum_row(row_ptr, used, cap, CAPPED, BLOCK)
    tl.store(sums_ptr + row, largest)
    tl.store(sums_ptr + rows + row, total)
    tl.store(sums_ptr + 2 * rows + row, _label_logit(row_ptr, tl.load(columns_ptr + row), used, cap, CAPPED))


@triton.jit
def _gradient(
    logits_ptr,
    columns_ptr,
    log_sums_ptr,
    d_losses_ptr,
    stride,
    width,
    used,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns_ptr + row)
    log_sum, d_loss = tl.load(log_sums_ptr + row), tl.load(d_losses_ptr + row)
    _write_gradient(logits_ptr + row * stride, column, log_sum, d_loss, width, used, cap, CAPPED, BLOCK)


@triton.jit
def _loss_and_gradient(
    logits_ptr, columns_ptr, losses_ptr, stride, width, used, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr, column = logits_ptr + row * stride, tl.load(columns_ptr + row)
    label_logit = _label_logit(row_ptr, column, used, cap, CAPPED)  # another warp may overwrite it after the sums
    largest, total = _sum_row(row_ptr, used, cap, CAPPED, BLOCK)
    log_sum = largest + tl.log(total)
    d_loss = tl.where(column >= 0, 1.0, 0.0)
    tl.store(losses_ptr + row, (log_sum - label_logit) * d_loss)
    _write_gradient(row_ptr, column, log_sum, d_loss, width, used, cap, CAPPED, BLOCK)


def sums(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    """Return maximum, sum of exponentials and label's logit of each row, fp32 [3, T] (`LossKernels.sums`)."""
    found = torch.empty(3, logits_Tv.shape[0], dtype=torch.float32, device=logits_Tv.device)
    _start(_sums, logits_Tv, columns_T, found, logits_Tv.stride(0), used, cap)
    return found


def write_gradient(
    logits_Tv: Tensor, columns_T: Tensor, log_sums_T: Tensor, d_losses_T: Tensor, used: int, cap: float | None
) -> None:
    """Overwrite the logits by their gradient (`LossKernels.write_gradient`)."""
    _start(_gradient, logits_Tv, columns_T, log_sums_T, d_losses_T, logits_Tv.stride(0), logits_Tv.shape[1], used, cap)


def loss_and_gradient(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    """Return each row's loss, fp32, and overwrite the logits by its gradient (`LossKernels.loss_and_gradient`)."""
    losses = torch.empty(logits_Tv.shape[0], dtype=torch.float32, device=logits_Tv.device)
    _start(_loss_and_gradient, logits_Tv, columns_T, losses, logits_Tv.stride(0), logits_Tv.shape[1], used, cap)
    return losses


def _start(kernel: Any, logits_Tv: Tensor, *arguments: Any) -> None:
    """Start a program for each row; the last of the arguments is the cap."""
    rows, width = logits_Tv.shape
    *others, cap = arguments
    block = min(triton.next_power_of_2(max(width, 1)), _LARGEST_BLOCK)
    if rows:
        kernel[(rows,)](logits_Tv, *others, cap or 1.0, CAPPED=cap is not None, BLOCK=block, num_warps=_warps(block))


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16 if torch.version.hip else 32)  # 1,024 threads, of 64 lanes a warp on AMD GPUs
