"""The dtypes of a step: compute in fp32, bf16 or fp16, with main params (master weights) in fp32 or bf16.

With fp8 linear layers all else computes in bf16; `precision/float8.py` has their matmuls.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megalaunch.schema.precision import PrecisionSpec

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def compute_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Return the dtype of activations, and of matmuls but those in fp8. Raises ValueError while it is still `auto`."""
    if precision.compute_dtype == "auto":
        raise ValueError("precision.compute_dtype is still auto: the launcher resolves it before workers start")
    return _FORMATS[precision.compute_dtype]


def residual_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Return the dtype of the residual stream, and of activations sent between pipeline stages."""
    return torch.float32 if precision.residual_dtype == "fp32" else compute_dtype(precision)


def block_dtype(precision: PrecisionSpec) -> torch.dtype | None:
    """Return the dtype of the blocks if the residual stream is wider; None if both have the same dtype."""
    compute = compute_dtype(precision)
    return None if residual_dtype(precision) == compute else compute


def grad_reduce_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Return the dtype in which gradients are reduced over ranks."""
    return _FORMATS[precision.grad_reduce_dtype]


def moment_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Return the dtype of the optimizer's moments."""
    return _FORMATS[precision.exp_avg_dtype]


def main_params_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Return the dtype of the sharded parameters that the optimizer updates."""
    return _FORMATS[precision.main_params_dtype]


def mixed_precision_policy(precision: PrecisionSpec) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: parameters are all-gathered in the compute dtype, gradients are `precision.grad_dtype`.

    FSDP2 has one `reduce_dtype`, for accumulating gradients over microbatches and for reducing them over ranks. Here it
    is the first; the second is set separately (`grad_reduce_dtype`, by `parallel/fsdp.py`). Layer inputs are cast to
    the compute dtype too, unless they are a wider residual stream.
    """
    compute = compute_dtype(precision)
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=_FORMATS[precision.grad_dtype],
        cast_forward_inputs=block_dtype(precision) is None,
    )
