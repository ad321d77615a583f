"""What the card reaches: matmuls in bf16 and fp8, copies of its memory. Kernels and steps are compared with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from gpu_parts.setting import Setting, Unsupported
from gpu_parts.timing import median_seconds


def _random(setting: Setting, *size: int) -> Tensor:
    return torch.randn(*size, device=setting.device, dtype=torch.bfloat16)


def _matmul(setting: Setting, m: int, k: int, n: int) -> dict[str, Any]:
    a, b = _random(setting, m, k), _random(setting, n, k)
    seconds = median_seconds(lambda: a @ b.T, setting.device)
    return {"shape": [m, k, n], "tflops": 2 * m * k * n / seconds / 1e12}


def _fp8_matmul(setting: Setting, kind: ScalingType) -> dict[str, Any]:
    if setting.device != "cuda":
        raise Unsupported("fp8 matmuls need a GPU")
    size = 256 if setting.small else 8192
    a, b = (_random(setting, size, size).to(torch.float8_e4m3fn) for _ in range(2))
    shapes = ((), ()) if kind is ScalingType.TensorWise else ((size, 1), (1, size))
    scales = [torch.ones(shape, device=setting.device) for shape in shapes]

    def call() -> Tensor:
        return scaled_mm(a, b.T, scales[0], kind, scales[1], kind, output_dtype=torch.bfloat16, use_fast_accum=True)

    return {"shape": [size] * 3, "tflops": 2 * size**3 / median_seconds(call, setting.device) / 1e12}


def _copy(setting: Setting) -> dict[str, Any]:
    source = torch.randn((1 << 16) if setting.small else (1 << 29), device=setting.device)  # 2 GiB
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), setting.device)
    return {"bytes": 2 * source.nbytes, "gigabytes_per_second": 2 * source.nbytes / seconds / 1e9}


def ceilings(setting: Setting) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements by name."""
    size = 256 if setting.small else 8192
    tokens, hidden, ffn = (64, 64, 128) if setting.small else (16384, 2048, 8192)
    return {
        "bf16 matmul": lambda: _matmul(setting, size, size, size),
        "bf16 matmul, MLP of 1B": lambda: _matmul(setting, tokens, hidden, ffn),
        "bf16 matmul, MLP of 8B": lambda: _matmul(setting, tokens, 2 * hidden, int(1.75 * ffn)),
        "fp8 matmul, scale of the tensor": lambda: _fp8_matmul(setting, ScalingType.TensorWise),
        "fp8 matmul, scale of each row": lambda: _fp8_matmul(setting, ScalingType.RowWise),
        "memory copy": lambda: _copy(setting),
    }
