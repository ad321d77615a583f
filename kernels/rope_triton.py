"""The Triton kernel of rope.py; imported only where Triton is installed and the kernel is used.

A program rotates some heads of one token, of queries or of keys. Arithmetic in fp32, or in fp64 if an input is.
Shapes: B batch, N heads of queries, G heads of keys, S sequence, D head dim, R rotated features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # most pairs that a program handles


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head,
    out_head,
    cos,
    sin,
    first,
    heads,
    half,
    rest,
    H: tl.constexpr,
    P: tl.constexpr,
    REST: tl.constexpr,
):
    head = (first * H + tl.arange(0, H)).to(tl.int64)[:, None]
    pair = tl.arange(0, P)[None, :]
    inside = (head < heads) & (pair < half)
    a = tl.load(x_ptr + head * x_head + pair, mask=inside, other=0.0).to(cos.dtype)
    b = tl.load(x_ptr + head * x_head + half + pair, mask=inside, other=0.0).to(cos.dtype)
    tl.store(out_ptr + head * out_head + pair, a * cos - b * sin, mask=inside)
    tl.store(out_ptr + head * out_head + half + pair, b * cos + a * sin, mask=inside)
    if REST > 0:  # features that are not rotated
        other = tl.arange(0, REST)[None, :]
        kept = (head < heads) & (other < rest)
        values = tl.load(x_ptr + head * x_head + 2 * half + other, mask=kept, other=0.0)
        tl.store(out_ptr + head * out_head + 2 * half + other, values, mask=kept)


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    tokens,
    q_heads,
    k_heads,
    q_blocks,
    half,
    rest,
    way,
    WIDE: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    REST: tl.constexpr,
):
    batch, token = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    block = tl.program_id(1)
    pair = tl.arange(0, P)[None, :]
    cos = tl.load(cos_ptr + batch * cos_batch + token * cos_token + pair, mask=pair < half, other=0.0).to(WIDE)
    sin = tl.load(sin_ptr + batch * sin_batch + token * sin_token + pair, mask=pair < half, other=0.0).to(WIDE) * way
    if block < q_blocks:
        at, out = batch * q_batch + token * q_token, batch * q_out_batch + token * q_out_token
        _rotate_heads(q_ptr + at, q_out_ptr + out, q_head, q_out_head, cos, sin, block, q_heads, half, rest, H, P, REST)
    else:
        at, out = batch * k_batch + token * k_token, batch * k_out_batch + token * k_out_token
        _rotate_heads(
            k_ptr + at, k_out_ptr + out, k_head, k_out_head, cos, sin, block - q_blocks, k_heads, half, rest, H, P, REST
        )


def rotate(heads: Sequence[Tensor], outputs: Sequence[Tensor], cos: Tensor, sin: Tensor, way: int) -> None:
    """Rotate one tensor [B, N, S, D], or two of as many tokens, by the angles (`way` 1) or back (-1).

    Args:
        heads: Queries and keys, or either.
        outputs: What to write to, of the same shapes; features are adjacent.
        cos, sin: [S, R] or [B, 1, S, R] of both halves, which are equal.
        way: 1 or -1.
    """
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in heads]
    batch, _, tokens, width = inputs[0].shape
    if not any(x.numel() for x in inputs):
        return
    tables = [_per_token(table, batch, tokens) for table in (cos, sin)]
    half = cos.shape[-1] // 2
    rest = width - 2 * half
    pairs = triton.next_power_of_2(half)
    counts = [inputs[0].shape[1], inputs[1].shape[1] if len(inputs) > 1 else 0]
    block = min(max(_BLOCK // pairs, 1), triton.next_power_of_2(max(counts)))
    blocks = [triton.cdiv(count, block) for count in counts]
    wide = any(x.dtype == torch.float64 for x in (*inputs, cos))
    q, k, q_out, k_out = inputs[0], inputs[-1], outputs[0], outputs[-1]
    _rotate[(batch * tokens, sum(blocks))](
        q,
        k,
        q_out,
        k_out,
        *tables,
        *(stride for x in (q, k, q_out, k_out) for stride in x.stride()[:3]),
        *(stride for table in tables for stride in table.stride()[:2]),
        tokens,
        *counts,
        blocks[0],
        half,
        rest,
        way,
        WIDE=tl.float64 if wide else tl.float32,
        H=block,
        P=pairs,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )


def _per_token(table: Tensor, batch: int, tokens: int) -> Tensor:
    """View a table as [B, S, R], with adjacent features."""
    table = table if table.stride(-1) == 1 else table.contiguous()
    return (table if table.dim() == 2 else table[:, 0]).expand(batch, tokens, table.shape[-1])
