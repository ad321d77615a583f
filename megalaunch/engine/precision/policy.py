"""In which number formats a step runs: fp32 or bf16, with fp32 master weights either way."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megalaunch.config.schema.precision import PrecisionSpec

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(precision: PrecisionSpec) -> torch.dtype:
    """The format of matmuls; raises ValueError while it is still `auto`."""
    if precision.compute_dtype == "auto":
        raise ValueError("precision.compute_dtype is still auto: the launcher resolves it before workers start")
    return _FORMATS[precision.compute_dtype]


def residual_dtype(precision: PrecisionSpec) -> torch.dtype:
    """The format of the residual stream, and of what one pipeline stage hands to the next."""
    return torch.float32 if precision.residual_dtype == "fp32" else compute_dtype(precision)


def block_dtype(precision: PrecisionSpec) -> torch.dtype | None:
    """The format of blocks beside a wider residual stream; None where the two are one."""
    compute = compute_dtype(precision)
    return None if residual_dtype(precision) == compute else compute


def grad_reduce_dtype(precision: PrecisionSpec) -> torch.dtype:
    """The format in which ranks exchange gradients."""
    return _FORMATS[precision.grad_reduce_dtype]


def mixed_precision_policy(precision: PrecisionSpec) -> MixedPrecisionPolicy:
    """FSDP2's view: parameters are cast when gathered, gradients kept and added up in `precision.grad_dtype`.

    In which format ranks exchange them is said apart (`grad_reduce_dtype`), for which FSDP2 has no word of its own.
    A layer's input is cast as well, unless it is a stream that is to stay wide.
    """
    compute = compute_dtype(precision)
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=_FORMATS[precision.grad_dtype],
        cast_forward_inputs=block_dtype(precision) is None,
    )
