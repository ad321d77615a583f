"""In which number formats a step runs: fp32 or bf16, with fp32 master weights either way."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megalaunch.config.schema.precision import PrecisionSpec

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_format(precision: PrecisionSpec) -> torch.dtype:
    """The format of matmuls; raises ValueError while it is still `auto`."""
    if precision.compute == "auto":
        raise ValueError("precision.compute is still auto: the launcher resolves it before workers start")
    return _FORMATS[precision.compute]


def sharding_policy(precision: PrecisionSpec) -> MixedPrecisionPolicy:
    """FSDP2's view: parameters are cast when gathered, gradients summed in `precision.reduce`."""
    return MixedPrecisionPolicy(param_dtype=compute_format(precision), reduce_dtype=_FORMATS[precision.reduce])
