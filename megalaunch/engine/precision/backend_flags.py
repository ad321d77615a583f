"""Set torch's process-wide flags of numerics: TF32, reduced-precision sums, deterministic kernels."""

from __future__ import annotations

import torch

from megalaunch.engine.platform.registry import platform_of
from megalaunch.schema import RunSpec


def set_backend_flags(spec: RunSpec, device: torch.device) -> None:
    """Set the flags of a run, before its first matmul: libraries of devices read some of them once."""
    platform = platform_of(device)
    platform.set_matmul_precision(spec.precision.tf32)
    if spec.train.deterministic:
        platform.set_deterministic()
        # Nothing reads fresh memory (tests fill it with NaN), so that filling it on every allocation only costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
