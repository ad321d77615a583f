"""The Triton kernels as operators of torch (namespace megalaunch), with rules for fake tensors and for autograd.

So torch.compile keeps them in a graph, and a simulation with fake tensors sees what they allocate. Imported only where
the kernels are used or simulated, since the registration takes some 40 ms; Triton is imported by the first call. The
derivatives of gather_rows and sum_rows are those of permute.py, which both of its forms share.

Norms:     h = x, or x + update,  y = (h - m) r w + b,  with r = 1 / rms(h); in LayerNorm m = mean(h), and r of h - m
Backward:  with n = (h - m) r and g = dy w:  dw = sum over rows of dy n,  db = sum over rows of dy,
           dx = dupdate = dh + r (g - n mean(g n)), in LayerNorm also - r mean(g)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("megalaunch::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Differentiable: saves both, and recomputes silu(gate) in backward."""
    from megalaunch.kernels.swiglu_triton import forward

    return forward(gate, up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@custom_op("megalaunch::swiglu_backward", mutates_args=())
def _swiglu_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    from megalaunch.kernels.swiglu_triton import backward

    return backward(d_out, gate, up)


@_swiglu_backward.register_fake
def _(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = _swiglu_backward(d_out, *ctx.saved_tensors)
    return d_gate, d_up


swiglu.register_autograd(_differentiate_swiglu, setup_context=_save_swiglu)


@custom_op("megalaunch::geglu", mutates_args=())
def geglu(gate: Tensor, up: Tensor, variant: str) -> Tensor:
    """Return gelu(gate) * up by a `GegluVariant`. Differentiable: saves both, and recomputes gelu(gate) in backward."""
    from megalaunch.kernels.geglu_triton import forward

    return forward(gate, up, variant)


@geglu.register_fake
def _(gate: Tensor, up: Tensor, variant: str) -> Tensor:
    return gate.new_empty(gate.shape)


@custom_op("megalaunch::geglu_backward", mutates_args=())
def _geglu_backward(d_out: Tensor, gate: Tensor, up: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    from megalaunch.kernels.geglu_triton import backward

    return backward(d_out, gate, up, variant)


@_geglu_backward.register_fake
def _(d_out: Tensor, gate: Tensor, up: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_geglu(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.variant = inputs
    ctx.save_for_backward(gate, up)


def _differentiate_geglu(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
    d_gate, d_up = _geglu_backward(d_out, *ctx.saved_tensors, ctx.variant)
    return d_gate, d_up, None


geglu.register_autograd(_differentiate_geglu, setup_context=_save_geglu)


@custom_op("megalaunch::rope", mutates_args=())
def rope(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, way: int) -> list[Tensor]:
    """Rotate one tensor [B, N, S, D] or two by the angles of each token (`way` 1) or back (-1). Differentiable."""
    from megalaunch.kernels.rope_triton import rotate

    rotated = _empty_rotated(heads)
    rotate(heads, rotated, cos, sin, way)
    return rotated


@rope.register_fake
def _(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, way: int) -> list[Tensor]:
    return _empty_rotated(heads)


def _empty_rotated(heads: Sequence[Tensor]) -> list[Tensor]:
    """Return memory for rotated heads, with the order of their dims; features are adjacent."""
    formats = (torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format for x in heads)
    return [torch.empty_like(x, memory_format=layout) for x, layout in zip(heads, formats, strict=True)]


def _save_rope(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cos, sin, ctx.way = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_rope(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None, None, None]:
    return rope(gradients, *ctx.saved_tensors, -ctx.way), None, None, None


rope.register_autograd(_differentiate_rope, setup_context=_save_rope)


@custom_op("megalaunch::add_norm", mutates_args=())
def add_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h = x + update, its norm in `dtype`, and of each row m (without elements in RMSNorm) and r.

    Differentiable: saves h, m and r.
    """
    from megalaunch.kernels.add_norm_triton import forward

    total, *others = made = _empty_sum_and_norm(x, update, weight, bias, dtype)
    forward(x, update, weight, bias, epsilon, total, *others)
    return made


@add_norm.register_fake
def _(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_sum_and_norm(x, update, weight, bias, dtype)


def _empty_sum_and_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = torch.promote_types(x.dtype, update.dtype)
    normed, mean, inverse = _empty_norm(x, bias, dtype, _wide_dtype(summed, weight.dtype))
    return x.new_empty(x.shape, dtype=summed), normed, mean, inverse


def _empty_norm(x: Tensor, bias: Tensor | None, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for a norm in `dtype`, and for m (without elements in RMSNorm) and r of each row, [R]."""
    rows = x.numel() // x.shape[-1]
    mean, inverse = (x.new_empty(count, dtype=wide) for count in (0 if bias is None else rows, rows))
    return x.new_empty(x.shape, dtype=dtype), mean, inverse


def _wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


@custom_op("megalaunch::norm_backward", mutates_args=())
def _norm_backward(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, in its dtype, and of weight and bias (without elements in RMSNorm) in fp32 or fp64.

    Args:
        d_total: The gradient of h by what else reads it; None: nothing does.
        d_normed: The gradient of the norm.
        total: h.
        weight: The weight [H].
        mean, inverse: m and r.
        layer: Whether it is a LayerNorm.
    """
    from megalaunch.kernels.add_norm_triton import backward

    d, d_weight, d_bias = backward(d_total, d_normed, total, weight, mean if layer else None, inverse)
    return d, d_weight, d_weight.new_empty(0) if d_bias is None else d_bias


@_norm_backward.register_fake
def _(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = total.shape[-1]
    return total.new_empty(total.shape), inverse.new_empty(width), inverse.new_empty(width if layer else 0)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, weight, bias, _, _ = inputs
    total, _, mean, inverse = output
    ctx.dtypes = x.dtype, update.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(total, weight, mean, inverse)
    ctx.mark_non_differentiable(mean, inverse)
    ctx.set_materialize_grads(False)


def _differentiate_add_norm(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    of_x, of_update, of_weight, of_bias = ctx.dtypes
    d_weight = d_bias = None
    if d_normed is not None:
        d_total, d_weight, d_bias = _norm_backward(d_total, d_normed, *ctx.saved_tensors, of_bias is not None)
    found = zip((d_total, d_total, d_weight, d_bias), (of_x, of_update, of_weight, of_bias), strict=True)
    return *(None if d is None or dtype is None else d.to(dtype) for d, dtype in found), None, None


add_norm.register_autograd(_differentiate_add_norm, setup_context=_save_add_norm)


@custom_op("megalaunch::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x in its dtype, and of each row m (without elements in RMSNorm) and r. Differentiable."""
    from megalaunch.kernels.add_norm_triton import forward

    made = _empty_norm(x, bias, x.dtype, _wide_dtype(x.dtype, weight.dtype))
    forward(x, None, weight, bias, epsilon, None, *made)
    return made


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_norm(x, bias, x.dtype, _wide_dtype(x.dtype, weight.dtype))


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _, mean, inverse = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mean, inverse)
    ctx.mark_non_differentiable(mean, inverse)


def _differentiate_norm(ctx: Any, d_normed: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, inverse = ctx.saved_tensors  # once: a checkpoint that recomputes them refuses a second read
    has_bias = ctx.bias_dtype is not None
    d, d_weight, d_bias = _norm_backward(None, d_normed, x, weight, mean, inverse, has_bias)
    return d, d_weight.to(weight.dtype), d_bias.to(ctx.bias_dtype) if has_bias else None, None


norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


@custom_op("megalaunch::gather_rows", mutates_args=())
def gather_rows(x_TH: Tensor, pairs_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Return the token of each row (`RowKernels.gather`)."""
    from megalaunch.kernels import permute_triton

    return permute_triton.gather_rows(x_TH, pairs_R, rows_Tk)


@gather_rows.register_fake
def _(x_TH: Tensor, pairs_R: Tensor, rows_Tk: Tensor) -> Tensor:
    return x_TH.new_empty(pairs_R.shape[0], x_TH.shape[1])


@custom_op("megalaunch::sum_rows", mutates_args=())
def sum_rows(y_RH: Tensor, rows_Tk: Tensor, weights_Tk: Tensor | None) -> Tensor:
    """Return the (weighted) sum of each token's rows (`RowKernels.sum`)."""
    from megalaunch.kernels import permute_triton

    return permute_triton.sum_rows(y_RH, rows_Tk, weights_Tk)


@sum_rows.register_fake
def _(y_RH: Tensor, rows_Tk: Tensor, weights_Tk: Tensor | None) -> Tensor:
    return y_RH.new_empty(rows_Tk.shape[0], y_RH.shape[1])


@custom_op("megalaunch::weigh_rows", mutates_args=())
def weigh_rows(
    dy_TH: Tensor, y_RH: Tensor, pairs_R: Tensor, rows_Tk: Tensor, weights_Tk: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights (`RowKernels.weigh`)."""
    from megalaunch.kernels import permute_triton

    return permute_triton.weigh_rows(dy_TH, y_RH, pairs_R, rows_Tk, weights_Tk)


@weigh_rows.register_fake
def _(dy_TH: Tensor, y_RH: Tensor, pairs_R: Tensor, rows_Tk: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor]:
    return y_RH.new_empty(y_RH.shape), weights_Tk.new_empty(weights_Tk.shape)


@custom_op("megalaunch::loss_sums", mutates_args=())
def loss_sums(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    """Return maximum, sum of exponentials and label's logit of each row (`LossKernels.sums`)."""
    from megalaunch.kernels.linear_loss_triton import sums

    return sums(logits_Tv, columns_T, used, cap)


@loss_sums.register_fake
def _(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    return logits_Tv.new_empty(3, logits_Tv.shape[0], dtype=torch.float32)


@custom_op("megalaunch::write_loss_gradient", mutates_args=("logits_Tv",))
def write_loss_gradient(
    logits_Tv: Tensor, columns_T: Tensor, log_sums_T: Tensor, d_losses_T: Tensor, used: int, cap: float | None
) -> None:
    """Overwrite the logits by their gradient (`LossKernels.write_gradient`)."""
    from megalaunch.kernels.linear_loss_triton import write_gradient

    write_gradient(logits_Tv, columns_T, log_sums_T, d_losses_T, used, cap)


@custom_op("megalaunch::loss_and_gradient", mutates_args=("logits_Tv",))
def loss_and_gradient(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    """Return each row's loss, and overwrite the logits by their gradient (`LossKernels.loss_and_gradient`)."""
    from megalaunch.kernels.linear_loss_triton import loss_and_gradient as start

    return start(logits_Tv, columns_T, used, cap)


@loss_and_gradient.register_fake
def _(logits_Tv: Tensor, columns_T: Tensor, used: int, cap: float | None) -> Tensor:
    return logits_Tv.new_empty(logits_Tv.shape[0], dtype=torch.float32)


@custom_op("megalaunch::adamw", mutates_args=("weights", "averages", "squares", "updates"))
def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """Update weights and moments by AdamW, and count the update (`UpdateKernels.adamw`)."""
    from megalaunch.kernels.fused_update_triton import adamw as start

    start(weights, gradients, averages, squares, updates, lr, beta1, beta2, epsilon, weight_decay, divisor)


@custom_op("megalaunch::lion", mutates_args=("weights", "averages"))
def lion(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """Update weights and moments by Lion (`UpdateKernels.lion`)."""
    from megalaunch.kernels.fused_update_triton import lion as start

    start(weights, gradients, averages, lr, beta1, beta2, weight_decay, divisor)
