"""The `precision` section: dtypes of compute, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.schema.setting import setting

Float8Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
class Float8Spec:
    """FP8 matmuls, with precision.compute_dtype=fp8."""

    recipe: Float8Recipe = setting(
        "tensorwise", "Scaling granularity, and whether scales come from earlier steps (delayed)."
    )
    format: Literal["e4m3", "hybrid"] = setting("hybrid", "FP8 format: e4m3, or hybrid with gradients in e5m2.")
    wgrad: bool = setting(True, "Compute weight gradients in FP8 too; false: in bf16.")
    margin: int = setting(0, "Delayed scales are divided by 2 to the power of this margin.", minimum=0, maximum=16)
    amax_history_len: int = setting(
        1024,
        "Steps (Transformer Engine: microbatches) whose maximum absolute values (amax) determine the delayed scale; 1: "
        "the most recent one.",
        "steps",
        minimum=1,
    )
    param_gather: bool = setting(False, "All-gather parameters in FP8 over data-parallel ranks.")
    dot_product_attention: bool = setting(False, "Compute attention in FP8 too (Transformer Engine, recipe delayed).")
    first_layers_bf16: int = setting(0, "Number of first layers computed in bf16.", minimum=0)
    last_layers_bf16: int = setting(0, "Number of last layers computed in bf16.", minimum=0)
    implementation: Literal["native", "transformer_engine"] = setting("native", "Implementation of the FP8 matmuls.")


@dataclass(frozen=True, kw_only=True)
class LossScaleSpec:
    """Loss scaling, with precision.compute_dtype=fp16: a dynamic scale, or a constant one."""

    constant: float | None = setting(
        None, "Constant loss scale, best a power of 2; null: a dynamic one, by the keys below.", minimum=1
    )
    initial: float = setting(65536.0, "Initial loss scale.", minimum=1)
    minimum: float = setting(1.0, "Minimum loss scale.", minimum=0)
    window: int = setting(1000, "Steps without overflow before the scale doubles.", "steps", minimum=1)
    hysteresis: int = setting(2, "Overflows before the scale halves.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Dtypes of compute, gradients, parameters and optimizer states."""

    compute_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = setting(
        "auto", "Dtype of matmuls and activations; auto: bf16 if the device supports it natively, else fp32."
    )
    emulate: bool = setting(
        False, "Compute FP8 matmuls on hardware without them: cast to FP8 and back, multiply in fp32; slow."
    )
    tf32: bool = setting(
        False, "Compute fp32 matmuls of GPUs on TF32 tensor cores, with inputs rounded to 10 bits of mantissa."
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = setting("fp32", "Dtype of gradient reduction over ranks.")
    grad_dtype: Literal["fp32", "bf16"] = setting("fp32", "Dtype of gradient accumulation.")
    exp_avg_dtype: Literal["fp32", "bf16"] = setting("fp32", "Dtype of the optimizer's moments.")
    main_params_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Dtype of the main params (master weights) that the optimizer updates; bf16: no fp32 copy, rounded updates.",
    )
    residual_dtype: Literal["compute", "fp32"] = setting("compute", "Dtype of the residual stream.")
    fp8: Float8Spec = field(default_factory=Float8Spec)
    loss_scale: LossScaleSpec = field(default_factory=LossScaleSpec)

    @property
    def emulates_fp8(self) -> bool:
        """Whether fp8 matmuls multiply dequantized values in fp32."""
        return self.compute_dtype == "fp8" and self.emulate

    @property
    def uses_transformer_engine(self) -> bool:
        """Whether Transformer Engine computes the linear layers."""
        return self.compute_dtype == "fp8" and self.fp8.implementation == "transformer_engine"
