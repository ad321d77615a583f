"""What is measured of a kernel: inputs, and forms that compute the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_parts.setting import Setting

Form = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Shapes: those of Llama-3.2-1B and of Qwen3's experts, or tiny ones."""

    tokens: int = 16384
    hidden: int = 2048
    ffn: int = 8192
    vocabulary: int = 128256
    sequence: int = 8192
    heads: int = 32
    groups: int = 8
    experts: int = 128
    choices: int = 8
    expert_ffn: int = 768
    tensors: int = 64
    tensor: int = 1 << 22


SMALL = Sizes(64, 64, 128, 512, 64, 4, 2, 4, 2, 32, 3, 1 << 10)


@dataclass(frozen=True)
class Kernel:
    """One kernel on given inputs; a step of training reads and writes `bytes` at least, and computes `flops`.

    `backward` is False where there is none. `fp8`: the flops are those of fp8 matmuls.
    """

    inputs: tuple[Tensor, ...]
    forms: dict[str, Form]
    bytes: float = 0.0
    flops: float = 0.0
    backward: bool = True
    fp8: bool = False


def liger_functions() -> Any:
    """Return Liger's functions; None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    import liger_kernel.transformers.functional as liger

    return liger


class Inputs:
    """Random leaves on the device."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.sizes = setting, SMALL if setting.small else Sizes()
        self._generator = torch.Generator(setting.device).manual_seed(0)

    def randn(self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, device=self.setting.device, generator=self._generator) * scale
        return made.to(dtype).requires_grad_()

    def compiled(self, forms: dict[str, Form], reference: Form) -> dict[str, Form]:
        """The forms, with the compiled reference if torch.compile is used."""
        return {**forms, "torch.compile": torch.compile(reference)} if self.setting.compile else forms


def experts_inputs(at: Inputs) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return rows, the matrices of their experts, the offsets of even loads, and the operations of a step."""
    s = at.sizes
    rows = s.tokens * s.choices // 2
    x, weight = at.randn(rows, s.hidden), at.randn(s.experts, s.expert_ffn, s.hidden, scale=0.02)
    offsets = torch.arange(1, s.experts + 1, device=x.device, dtype=torch.int32) * (rows // s.experts)
    return x, weight, offsets, 6 * rows * s.hidden * s.expert_ffn
