"""Forms of operators that a context prescribes in place of the device's own: for a simulation of another device.

They are no overrides of a vendor (overridable.py), which a context with forms does not use. The dispatch of a kernel
asks for them first. They are set through a context variable, not by an argument: the backward pass and the
recomputation of activations call kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

Block = tuple[int, int]
"""Rows and columns of a matrix that share one fp8 scale; 0 stands for all of them."""

LARGEST_SCALE = 2.0**126
"""The largest fp8 scale: its inverse is the smallest normal fp32 number, which a GPU does not flush to 0."""


def block_counts(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks a matrix has along its rows and its columns."""
    (rows, columns), (height, width) = shape, block
    return -(-rows // height) if height else 1, -(-columns // width) if width else 1


@dataclass(frozen=True)
class RowKernels:
    """One form of the operators of permute.py, on tokens [T, H] and rows [R, H] in the order of experts.

    Attributes:
        gather: (x_TH, pairs_R, rows_Tk) -> the token of each row, [R, H].
        sum: (y_RH, rows_Tk, weights_Tk or None) -> the weighted sum of each token's rows, [T, H].
        weigh: (dy_TH, y_RH, pairs_R, rows_Tk, weights_Tk) -> the gradients of y_RH and weights_Tk, given that of `sum`.
    """

    gather: Callable[[Tensor, Tensor, Tensor], Tensor]
    sum: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    weigh: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BlockKernel:
    """Fused attention of one block of queries and keys, all heads of one width.

    Attributes:
        supports: (queries, head dim) -> whether the kernel takes queries of this dtype and device.
        forward: (q [B, N, S, D], k, v [B, G, T, D], causal, scale) -> output [B, N, S, D], log-sum-exp fp32 [B, N, S].
        backward: (q, k, v, output, its gradient, log-sum-exp, causal, scale) -> gradients of q, k and v. Output and
            log-sum-exp may be those of all blocks.
    """

    supports: Callable[[Tensor, int], bool]
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class CastKernels:
    """One form of the operators of float8_cast.py, on matrices [R, K] of any strides; results are contiguous.

    Attributes:
        amax: (x_RK, block) -> the largest absolute value of each block, fp32 [r, k].
        cast: (x_RK, scales_rk, block, dtype) -> fp8 values.
        cast_both: (x_RK, scale_11, dtype) -> fp8 values [R, K] and their transpose [K, R].
        cast_blocks: (x_RK, block, power_of_two, dtype) -> fp8 values and the scales of their blocks [r, k], which are
            (1, width) or square, with powers of two for both extents.
        cast_blocks_both: (x_RK, width, power_of_two, dtype) -> fp8 values of x and the scales of its (1, width) blocks,
            then those of its transpose [K, R].
        cast_with_amax: (x_RK, scale_11, dtype, transpose) -> fp8 values, their transpose (without elements if it is not
            asked for) and the largest absolute value of x, fp32 [1, 1].
    """

    amax: Callable[[Tensor, Block], Tensor]
    cast: Callable[[Tensor, Tensor, Block, torch.dtype], Tensor]
    cast_both: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    cast_blocks: Callable[[Tensor, Block, bool, torch.dtype], tuple[Tensor, Tensor]]
    cast_blocks_both: Callable[[Tensor, int, bool, torch.dtype], tuple[Tensor, Tensor, Tensor, Tensor]]
    cast_with_amax: Callable[[Tensor, Tensor, torch.dtype, bool], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class LossKernels:
    """One form of the operators of linear_loss.py, on logits [T, v] whose columns are adjacent.

    Columns are those of the labels, [T], -1 for a label that is not among them or that has no loss. Only the first
    `used` columns belong to tokens, and z = cap * tanh(logit / cap) if there is a cap.

    Attributes:
        sums: (logits_Tv, columns_T, used, cap) -> fp32 [3, T]: m = max_v z_v, sum_v exp(z_v - m), z of the label or 0.
        write_gradient: (logits_Tv, columns_T, log_sums_T, d_losses_T, used, cap): overwrites the logits by
            (exp(z_v - log_sum) - [v = column]) * d_loss, with the derivative of the cap; 0 behind the used columns.
        loss_and_gradient: (logits_Tv, columns_T, used, cap) -> fp32 [T], log(sum_v exp(z_v)) - z of the label, and 0
            for columns of -1; overwrites the logits by the gradient of their sum.
    """

    sums: Callable[[Tensor, Tensor, int, float | None], Tensor]
    write_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], None]
    loss_and_gradient: Callable[[Tensor, Tensor, int, float | None], Tensor]


@dataclass(frozen=True)
class UpdateKernels:
    """One form of the operators of fused_update.py, on lists of tensors in the same order.

    Arithmetic in fp32 whatever the dtypes, gradients divided by `divisor`; weights and moments are overwritten.

    Attributes:
        adamw: (weights, gradients, exp_avg, exp_avg_sq, numbers of updates, lr, beta1, beta2, epsilon, weight decay,
            divisor); adds 1 to the numbers.
        lion: (weights, gradients, exp_avg, lr, beta1, beta2, weight decay, divisor).
    """

    adamw: Callable[..., None]
    lion: Callable[..., None]


@dataclass(frozen=True)
class KernelForms:
    """Forms to use in place of those that the dispatch selects; None: what the dispatch selects.

    Attributes:
        on_cpu: The answer of `on_cpu`, whatever the device of a tensor.
        rms_norm: (x, weight, epsilon) -> normed x.
        attention: (q, k, v, mask) -> softmax(q k^T) v, with the mask [..., S, T] of the keys or a causal one (None).
        block_attention: attention of one block.
        flex_attention: (q, k, v, what its score modification reads) -> output and log-sum-exp, fp32 [B, N, S], as
            FlexAttention returns them; backward has all of these.
        swiglu: (gate, up) -> silu(gate) * up.
        geglu: (gate, up, variant) -> gelu(gate) * up, as `geglu`.
        grouped_matmul: (rows [R, K], matrices [E, K, N], offsets) -> [R, N], or (columns [K, R], rows [R, N], offsets)
            -> [E, K, N], as `F.grouped_mm`.
        row_kernels: The operators of permute.py.
        cast_kernels: The operators of float8_cast.py.
        loss_kernels: The operators of linear_loss.py.
        update_kernels: The operators of fused_update.py.
    """

    on_cpu: bool | None = None
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    block_attention: BlockKernel | None = None
    flex_attention: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]] | None = None
    swiglu: Callable[[Tensor, Tensor], Tensor] | None = None
    geglu: Callable[..., Tensor] | None = None
    grouped_matmul: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    row_kernels: RowKernels | None = None
    cast_kernels: CastKernels | None = None
    loss_kernels: LossKernels | None = None
    update_kernels: UpdateKernels | None = None


_NONE = KernelForms()
_current: ContextVar[KernelForms] = ContextVar("kernel_forms", default=_NONE)


def kernel_forms() -> KernelForms:
    """Return the forms of the current context; none in a graph of torch.compile, which cannot trace the lookup."""
    return _NONE if torch.compiler.is_compiling() else _current.get()


def prescribes_forms() -> bool:
    """Return whether this context prescribes forms."""
    return kernel_forms() is not _NONE


def on_cpu(x: Tensor) -> bool:
    """Return whether to use the forms for a CPU: by the device of `x`, unless the context says otherwise."""
    forced = kernel_forms().on_cpu
    return x.is_cpu if forced is None else forced


def uses_triton(x: Tensor) -> bool:
    """Return whether to use Triton kernels on `x`: on a GPU, where Triton is installed."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@contextmanager
def use_kernel_forms(forms: KernelForms) -> Iterator[None]:
    """Use the forms within the context."""
    token = _current.set(forms)
    try:
        yield
    finally:
        _current.reset(token)
