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


def stream_format(precision: PrecisionSpec) -> torch.dtype:
    """The format of the residual stream, and of what one pipeline stage hands to the next."""
    return torch.float32 if precision.residual == "fp32" else compute_format(precision)


def narrow_format(precision: PrecisionSpec) -> torch.dtype | None:
    """The format of blocks beside a wider residual stream; None where the two are one."""
    compute = compute_format(precision)
    return None if stream_format(precision) == compute else compute


def reduce_format(precision: PrecisionSpec) -> torch.dtype:
    """The format in which ranks exchange gradients."""
    return _FORMATS[precision.reduce]


def sharding_policy(precision: PrecisionSpec) -> MixedPrecisionPolicy:
    """FSDP2's view: parameters are cast when gathered, gradients kept and added up in `precision.gradients`.

    In which format ranks exchange them is said apart (`reduce_format`), for which FSDP2 has no word of its own.
    A layer's input is cast as well, unless it is a stream that is to stay wide.
    """
    compute = compute_format(precision)
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=_FORMATS[precision.gradients],
        cast_forward_inputs=narrow_format(precision) is None,
    )
