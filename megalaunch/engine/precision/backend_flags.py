"""Set torch's process-wide flags of numerics: TF32, reduced-precision sums, deterministic kernels."""

from __future__ import annotations

import os

import torch

from megalaunch.schema import RunSpec

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_backend_flags(spec: RunSpec, device: torch.device) -> None:
    """Set the flags of a run, before its first matmul: cuBLAS reads its environment once.

    On CUDA a sum of bf16 or fp16 products that is split over thread blocks is added up in fp32, not in the output's
    dtype, as torch's default allows.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if spec.precision.tf32 else "highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if spec.train.deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Nothing reads fresh memory (tests fill it with NaN), so that filling it on every allocation only costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
