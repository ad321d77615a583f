"""The `precision` section: in which number formats a step is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.config.schema.setting import setting

Float8Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
class Float8Spec:
    """8-bit matmuls of precision.compute_dtype=fp8."""

    recipe: Float8Recipe = setting("tensorwise", "What shares a scale, and whether it lags a step (delayed).")
    format: Literal["e4m3", "hybrid"] = setting("hybrid", "hybrid: gradients in e5m2.")
    amax_history_len: int = setting(1024, "Steps whose largest values give the delayed scale.", "steps", minimum=1)
    param_gather: bool = setting(False, "Data-parallel ranks gather 8-bit parameters.")
    first_layers_bf16: int = setting(0, "First layers that stay in bf16.", minimum=0)
    last_layers_bf16: int = setting(0, "Last layers that stay in bf16.", minimum=0)
    implementation: Literal["native", "transformer_engine"] = setting("native", "Whose kernels multiply.")


@dataclass(frozen=True, kw_only=True)
class LossScaleSpec:
    """Dynamic loss scaling of precision.compute_dtype=fp16."""

    initial: float = setting(65536.0, "First scale.", minimum=1)
    minimum: float = setting(1.0, "Smallest scale.", minimum=0)
    window: int = setting(1000, "Steps without overflow after which it doubles.", "steps", minimum=1)
    hysteresis: int = setting(2, "Overflows before it halves.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """In which formats a step is computed, and what it changes is kept."""

    compute_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = setting(
        "auto", "Format of matmuls and activations; auto: bf16 where the device multiplies it natively, else fp32."
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = setting("fp32", "Format in which gradients are summed over ranks.")
    grad_dtype: Literal["fp32", "bf16"] = setting("fp32", "Format in which gradients are kept and added up.")
    exp_avg_dtype: Literal["fp32", "bf16"] = setting("fp32", "Format of the optimizer's moments.")
    main_params_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "Format of the weights that the optimizer changes; bf16: there are no finer ones."
    )
    residual_dtype: Literal["compute", "fp32"] = setting("compute", "Format of the residual stream.")
    fp8: Float8Spec = field(default_factory=Float8Spec)
    loss_scale: LossScaleSpec = field(default_factory=LossScaleSpec)
