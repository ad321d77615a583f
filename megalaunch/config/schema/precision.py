"""The `precision` section: in which number formats a step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Weights and optimizer states stay in fp32; these formats hold while a step runs."""

    compute: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "Format of matmuls and activations; auto: bf16 where the device multiplies it natively, else fp32."
    )
    reduce: Literal["fp32", "bf16"] = setting("fp32", "Format in which gradients are summed over ranks.")
