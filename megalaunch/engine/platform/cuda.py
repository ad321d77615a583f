"""CUDA as a platform; also AMD's chips, which torch's ROCm build calls cuda."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from megalaunch.engine.platform.platform import Platform

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class CudaPlatform(Platform):
    """NVIDIA's GPUs, and AMD's."""

    profiler_activity = ProfilerActivity.CUDA
    binds_process_group = True
    graph_class = "CUDAGraph"

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return fp16, and bf16 from Ampere on."""
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return (torch.bfloat16, torch.float16) if bf16 else (torch.float16,)

    def pin_pages(self, address: int, length: int) -> Callable[[], None]:
        """Register pages with the driver, as cudaHostAlloc does with those that it allocates."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(address, length, 0))
        return lambda: runtime.cudaHostUnregister(address)

    def set_matmul_precision(self, tf32: bool) -> None:
        """Set how matmuls are computed, before the first of them.

        A sum of bf16 or fp16 products that is split over thread blocks is added up in fp32, not in the output's dtype,
        as torch's default allows.
        """
        super().set_matmul_precision(tf32)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def set_deterministic(self) -> None:
        """Select deterministic kernels; cuBLAS reads the size of its workspace from the environment, once."""
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        super().set_deterministic()
