"""FlexAttention of torch and its block masks: compiled on a GPU; on a CPU operator by operator, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def flex_operator(q: Tensor) -> Callable[..., Any]:
    """Return FlexAttention for these queries; in a layer that is compiled already, uncompiled."""
    operator: Callable[..., Any] = flex_attention
    return _compiled() if q.is_cuda and not torch.compiler.is_compiling() else operator


def make_flex_mask(
    visible: Callable[..., Tensor], batch: int | None, queries: int, keys: int, device: torch.device
) -> BlockMask:
    """Return the block mask of `visible`, (batch, head, query, key) -> bool; on a GPU without making a dense mask."""
    return create_block_mask(visible, batch, None, queries, keys, device, _compile=device.type == "cuda")


@cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled
