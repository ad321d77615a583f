"""Quantised tensors of a folder, dequantised to bf16 when they are read: DeepSeek-V3's fp8 and gpt-oss's mxfp4.

fp8: `X` in e4m3 and `X_scale_inv`, one fp32 factor per block of rows and columns. mxfp4: `X_blocks`, two values of 4
bits per byte, and `X_scales`, one exponent per block of 32 values (OCP Microscaling Formats v1.0). Values of mxfp4 are
exact in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.mapped_weights import TensorInfo

_FP8_SCALES, _MX_BLOCKS, _MX_SCALES = "_scale_inv", "_blocks", "_scales"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of the 3 lower bits; the highest bit is the sign
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class _Dequantized:
    """A tensor as it is after dequantisation, and how to compute it."""

    shape: tuple[int, ...]
    read: Callable[[int | None], Tensor]
    dtype: str = "BF16"


class DequantizedFolder:
    """The tensors of a folder, with quantised ones replaced by their values in bf16."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder
        quantization: Any = folder.config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        self._stored, self._dequantized = folder.tensors, dict[str, _Dequantized]()
        self._consumed: set[str] = set()
        for name in self._stored:
            if method == "fp8" and name + _FP8_SCALES in self._stored:
                self._add_fp8(name, quantization.get("weight_block_size"))
            elif method == "mxfp4" and name.endswith(_MX_BLOCKS):
                self._add_mxfp4(name.removesuffix(_MX_BLOCKS))
        kept = {name: info for name, info in self._stored.items() if name not in self._consumed}
        self._tensors: Mapping[str, TensorInfo] = {**kept, **self._dequantized}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor, after dequantisation."""
        return self._tensors

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension. Raises CheckpointError."""
        found = self._dequantized.get(name)
        return self._folder.read(name, row) if found is None else found.read(row)

    def _add_fp8(self, name: str, block: Any) -> None:
        shape, scales = self._stored[name].shape, self._stored[name + _FP8_SCALES].shape
        valid = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if not valid or len(shape) != 2 or scales != tuple(-(-s // b) for s, b in zip(shape, block, strict=True)):
            return  # its own dtype stays visible, and is refused
        rows, columns = block

        def read(row: int | None) -> Tensor:
            value, factors = self._folder.read(name), self._folder.read(name + _FP8_SCALES)
            made = dequantize_fp8(value, factors, rows, columns)
            return made if row is None else made[row]

        self._consumed |= {name, name + _FP8_SCALES}
        self._dequantized[name] = _Dequantized(shape, read)

    def _add_mxfp4(self, base: str) -> None:
        scales = self._stored.get(base + _MX_SCALES)
        blocks = self._stored[base + _MX_BLOCKS].shape
        if scales is None or len(blocks) != 4 or blocks[:3] != scales.shape:
            return  # the blocks stay visible, and are refused
        experts, rows, count, half = blocks

        def read(row: int | None) -> Tensor:
            codes, factors = (self._folder.read(base + part, row) for part in (_MX_BLOCKS, _MX_SCALES))
            if row is not None:
                return dequantize_mxfp4(codes.unsqueeze(0), factors.unsqueeze(0))[0]
            return dequantize_mxfp4(codes, factors)

        self._consumed |= {base + _MX_BLOCKS, base + _MX_SCALES}
        self._dequantized[base] = _Dequantized((experts, 2 * count * half, rows), read)


def dequantize_fp8(value: Tensor, factors: Tensor, rows: int, columns: int) -> Tensor:
    """Return value x factor in bf16, [out, in]; `factors` has one entry per block of `rows` x `columns` values."""
    made = torch.empty(value.shape, dtype=torch.bfloat16)
    for index, factor in enumerate(factors.float()):
        piece = slice(index * rows, (index + 1) * rows)
        each = factor.repeat_interleave(columns)[: value.shape[1]]
        made[piece] = (value[piece].float() * each).bfloat16()
    return made


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values [E, in, out] in bf16 of blocks [E, out, in / 32, 16] and scales [E, out, in / 32].

    A byte has the value with the lower index in its lower half. Experts are computed one at a time.
    """
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    experts, rows, count, half = blocks.shape
    made = torch.empty((experts, rows, count * half * 2), dtype=torch.bfloat16)
    for expert in range(experts):
        codes = blocks[expert].int()
        values = torch.stack((table[codes & 15], table[codes >> 4]), dim=-1).flatten(-2)
        exponents = scales[expert].int() - _EXPONENT_BIAS
        made[expert] = torch.ldexp(values, exponents[..., None]).flatten(-2).bfloat16()
    return made.mT
