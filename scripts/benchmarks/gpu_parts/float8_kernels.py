"""Matmuls and casts in fp8, each in several forms (see kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.kernel import Form, Inputs, Kernel, experts_inputs
from gpu_parts.setting import Setting, Unsupported
from megalaunch.engine.precision.amax_history import AmaxHistories
from megalaunch.engine.precision.float8 import Float8Matmuls, operand_dtypes
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.kernels.float8_cast import (
    E4M3,
    E5M2,
    REFERENCE,
    Float8Matrix,
    block_amax,
    power_of_two_scale,
    scale_from_amax,
)
from megalaunch.kernels.forms import Block
from megalaunch.kernels.grouped_linear import grouped_linear, grouped_linear_by
from megalaunch.kernels.linear_matmuls import linear_by
from megalaunch.schema.precision import Float8Recipe, Float8Spec


def _float8_grouped_linear(recipe: str, format: str) -> Callable[[Inputs], Kernel]:
    def build(at: Inputs) -> Kernel:
        x, weight, offsets, flops = experts_inputs(at)
        spec = Float8Spec(recipe=recipe, format=format)  # type: ignore[arg-type]
        matmuls = Float8GroupedMatmuls(spec, at.setting.device != "cuda", lambda operand, amax: amax, None)
        forms: dict[str, Form] = {
            "bf16": lambda x, w: grouped_linear(x, w, offsets),
            "ours": lambda x, w: grouped_linear_by(matmuls, x, w, offsets),
        }
        return Kernel((x, weight), forms, flops=flops, fp8=True)

    return build


_GENERATIONS = {"blockwise": ("Hopper", (9,)), "mxfp8": ("Blackwell", (10, 12))}
"""The cards whose matmuls take the scales of a recipe, with their major compute capabilities; others take any card."""


def _float8_linear(recipe: Float8Recipe) -> Callable[[Inputs], Kernel]:
    def build(at: Inputs) -> Kernel:
        require_card(recipe, at.setting)
        s = at.sizes
        x, weight = at.randn(s.tokens, 2 * s.hidden), at.randn(7 * s.hidden, 2 * s.hidden, scale=0.02)
        spec, emulate = Float8Spec(recipe=recipe), at.setting.device != "cuda"
        histories = AmaxHistories({"linear": None}, spec.amax_history_len, operand_dtypes(spec), spec.margin, x.device)
        delayed = histories.of_layer("linear") if recipe == "delayed" else None
        matmuls = Float8Matmuls(spec, emulate, lambda operand, amax: amax, delayed)

        def ours(x: Tensor, w: Tensor) -> Tensor:
            return linear_by(matmuls, x, w)

        if delayed is not None:  # as in all steps but the first, scales are known
            made = ours(x, weight)
            torch.autograd.grad(made, (x, weight), torch.randn_like(made))
            histories.end_step(lambda amax: amax)

        forms: dict[str, Form] = {"bf16": F.linear, "ours": ours}
        if at.setting.compile:
            forms["ours, compiled"] = torch.compile(ours)
        return Kernel((x, weight), forms, flops=6 * x.numel() * weight.shape[0], fp8=True)

    return build


def require_card(recipe: Float8Recipe, setting: Setting) -> None:
    """Raise if the card has no matmul with the scales of a recipe."""
    generation, majors = _GENERATIONS.get(recipe, ("", ()))
    if setting.device == "cuda" and majors and torch.cuda.get_device_capability()[0] not in majors:
        raise Unsupported(f"{recipe} matmuls need {generation}")


def _float8_cast(block: Block, power_of_two: bool) -> Callable[[Inputs], Kernel]:
    """A cast with the scales of its own blocks: of one read, against an amax and a cast that read twice."""

    def build(at: Inputs) -> Kernel:
        x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()

        def reference(x: Tensor) -> Sequence[Tensor]:
            return REFERENCE.cast_blocks(x, block, power_of_two, E4M3)

        def ours(x: Tensor) -> Sequence[Tensor]:
            cast = Float8Matrix.quantize_blocks(x, block, E4M3, power_of_two=power_of_two)
            return cast.values, cast.scales

        def apart(x: Tensor) -> Sequence[Tensor]:
            amax = block_amax(x, block)
            scales = power_of_two_scale(amax, E4M3) if power_of_two else scale_from_amax(amax, E4M3)
            return Float8Matrix.quantize(x, scales, block, E4M3).values, scales

        forms: dict[str, Form] = {"reference": reference, "ours": ours, "ours, amax apart": apart}
        return Kernel((x,), at.compiled(forms, reference), bytes=3 * x.numel(), backward=False)

    return build


def _float8_cast_delayed(at: Inputs) -> Kernel:
    x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()
    scale = torch.full((1, 1), 100.0, device=x.device)

    def reference(x: Tensor) -> Sequence[Tensor]:
        return REFERENCE.cast_with_amax(x, scale, E4M3, True)

    def ours(x: Tensor) -> Sequence[Tensor]:
        rows, columns, amax = Float8Matrix.quantize_both_with_amax(x, scale, E4M3)
        return rows.values, columns.values, amax

    forms: dict[str, Form] = {"reference": reference, "ours": ours}
    return Kernel((x,), at.compiled(forms, reference), bytes=4 * x.numel(), backward=False)


def _float8_cast_both(at: Inputs) -> Kernel:
    """The cast of a gradient with one scale, and of its transpose."""
    x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()
    scale = torch.full((1, 1), 100.0, device=x.device)

    def reference(x: Tensor) -> Sequence[Tensor]:
        return REFERENCE.cast_both(x, scale, E5M2)

    def ours(x: Tensor) -> Sequence[Tensor]:
        return [cast.values for cast in Float8Matrix.quantize_both(x, scale, E5M2)]

    forms: dict[str, Form] = {"reference": reference, "ours": ours}
    return Kernel((x,), at.compiled(forms, reference), bytes=4 * x.numel(), backward=False)


def _float8_amax(block: Block) -> Callable[[Inputs], Kernel]:
    def build(at: Inputs) -> Kernel:
        x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()

        def reference(x: Tensor) -> Tensor:
            return REFERENCE.amax(x, block)

        forms: dict[str, Form] = {"reference": reference, "ours": lambda x: block_amax(x, block)}
        return Kernel((x,), at.compiled(forms, reference), bytes=2 * x.numel(), backward=False)

    return build


FLOAT8_KERNELS: dict[str, Callable[[Inputs], Kernel]] = {
    "fp8 linear, tensorwise": _float8_linear("tensorwise"),
    "fp8 linear, delayed": _float8_linear("delayed"),
    "fp8 linear, rowwise": _float8_linear("rowwise"),
    "fp8 linear, blockwise": _float8_linear("blockwise"),
    "fp8 linear, mxfp8": _float8_linear("mxfp8"),
    "fp8 cast, 1 x 128": _float8_cast((1, 128), False),
    "fp8 cast, 128 x 128": _float8_cast((128, 128), False),
    "fp8 cast, mxfp8": _float8_cast((1, 32), True),
    "fp8 cast, delayed, both layouts": _float8_cast_delayed,
    "fp8 cast, tensorwise, both layouts": _float8_cast_both,
    "fp8 amax, tensor": _float8_amax((0, 0)),
    "fp8 amax, rows": _float8_amax((1, 0)),
    "fp8 grouped linear, tensorwise": _float8_grouped_linear("tensorwise", "hybrid"),
    "fp8 grouped linear, rowwise": _float8_grouped_linear("rowwise", "hybrid"),
    "fp8 grouped linear, blockwise": _float8_grouped_linear("blockwise", "hybrid"),
    "fp8 grouped linear, mxfp8": _float8_grouped_linear("mxfp8", "hybrid"),
    "fp8 grouped linear, rowwise, e4m3": _float8_grouped_linear("rowwise", "e4m3"),
    "fp8 grouped linear, blockwise, e4m3": _float8_grouped_linear("blockwise", "e4m3"),
}
"""Linear layers and experts in the default format (gradients in e5m2) unless they say another."""
