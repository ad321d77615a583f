"""Causal attention: torch's operator, and a CPU form in blocks of a few queries, whose scores never leave the cache.

On a CPU torch's kernel multiplies more slowly than matmuls do, in bf16 by half. In the CPU form scores are fp32. The
softmax weights are saved for backward where they are few, else recomputed (Dao 2023). Key/value heads are not repeated:
the queries of all heads of a group are rows of one matmul.
Shapes: B batch, N query heads, G key/value groups, R = N / G, S tokens, D head dim (that of values and the output may
differ), q queries of a block, T keys before its end. Rows are token-major: the R heads of a token are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalaunch.kernels.forms import kernel_forms, on_cpu
from megalaunch.kernels.matmul import use_fp32_matmul
from megalaunch.kernels.overridable import overridable

FusedBackend = Literal["flash", "cudnn", "efficient"]
"""A fused kernel of torch's operator."""

_SDP_BACKENDS: Mapping[FusedBackend, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
)
_ROWS = 128  # per block: fewer multiply slowly, more waste work on masked keys
_LONGEST = 1024  # tokens in fp32: scores over more keys outgrow the cache, and torch's kernel is faster
_KEPT = 512  # tokens in fp32: weights over more keys take more memory than all else that a layer saves for backward


@overridable
def causal_sdpa(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float | None) -> Tensor:
    """Return softmax(scale q k^T) v over each query's own and all earlier positions, [B, N, S, D].

    A single query attends to all keys, of which there may then be more. `scale` None: 1 / sqrt(D).
    """
    form = kernel_forms().attention
    if form is not None:
        return form(q_BNSD, k_BGSD, v_BGSD, None)
    if blocks_are_faster(q_BNSD):
        return causal_sdpa_cpu(q_BNSD, k_BGSD, v_BGSD, q_BNSD.shape[-1] ** -0.5 if scale is None else scale)
    return causal_sdpa_reference(q_BNSD, k_BGSD, v_BGSD, scale)


def blocks_are_faster(q_BNSD: Tensor) -> bool:
    """Return whether the CPU form is faster than torch's: never in bf16 on a CPU with bf16 instructions."""
    tokens = q_BNSD.shape[2]
    if not q_BNSD.is_cpu or tokens == 1 or torch.compiler.is_compiling():  # a compiler would unroll the blocks
        return False
    return use_fp32_matmul(q_BNSD) or (q_BNSD.dtype == torch.float32 and tokens <= _LONGEST)


def causal_sdpa_reference(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float | None) -> Tensor:
    """Compute causal attention by torch's operator."""
    return _sdpa(q_BNSD, k_BGSD, v_BGSD, None, scale, causal=q_BNSD.shape[2] > 1)


@overridable
def masked_sdpa(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return softmax(scale q k^T) v over the keys that the mask [..., S, T] allows: torch's operator, [B, N, S, D].

    On a GPU keys and values are repeated for every head: its fused kernels with a mask take no groups, and without one
    torch computes and holds all scores.
    """
    if not on_cpu(q_BNSD):
        k_BGTD, v_BGTD = _for_every_head(k_BGTD, v_BGTD, q_BNSD)
    form = kernel_forms().attention
    if form is not None:
        return form(q_BNSD, k_BGTD, v_BGTD, mask)
    return masked_sdpa_reference(q_BNSD, k_BGTD, v_BGTD, mask, scale)


def masked_sdpa_reference(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Compute attention over the keys of a mask by torch's operator."""
    return _sdpa(q_BNSD, k_BGTD, v_BGTD, mask, scale)


def sdpa_by(
    backend: FusedBackend, q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return softmax(scale q k^T) v by one kernel of torch's operator, [B, N, S, D].

    Args:
        backend: The kernel; flash takes heads of one width, and efficient no groups of heads.
        mask: The keys that a query attends to, bool [..., S, T]; None: its own and all earlier positions.
        scale: None: 1 / sqrt(D).

    Raises:
        RuntimeError: The kernel does not compute these inputs; torch's warnings say why.
    """
    if backend == "efficient":
        k_BGTD, v_BGTD = _for_every_head(k_BGTD, v_BGTD, q_BNSD)
    form = kernel_forms().attention
    if form is not None:
        return form(q_BNSD, k_BGTD, v_BGTD, mask)
    with sdpa_kernel(_SDP_BACKENDS[backend]):
        return _sdpa(q_BNSD, k_BGTD, v_BGTD, mask, scale, causal=mask is None, one_width=backend == "flash")


def _for_every_head(k_BGTD: Tensor, v_BGTD: Tensor, q_BNSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of every query head, [B, N, T, .]."""
    heads = q_BNSD.shape[1] // k_BGTD.shape[1]
    if heads == 1:
        return k_BGTD, v_BGTD
    return k_BGTD.repeat_interleave(heads, dim=1), v_BGTD.repeat_interleave(heads, dim=1)


def _sdpa(
    q_BNSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool = False,
    one_width: bool = False,
) -> Tensor:
    """Call torch's operator. Its fused CPU kernel takes heads of one width: narrower ones are padded with zeros.

    `one_width`: the kernel asks for that on other devices too. Without a fused kernel the operator would save the
    weights of all pairs of tokens.
    """
    width, grouped = v_BGTD.shape[-1], q_BNSD.shape[1] != k_BGTD.shape[1]
    if width != q_BNSD.shape[-1] and (one_width or on_cpu(q_BNSD)):
        scale = q_BNSD.shape[-1] ** -0.5 if scale is None else scale
        widest = max(width, q_BNSD.shape[-1])
        q_BNSD, k_BGTD, v_BGTD = (F.pad(x, (0, widest - x.shape[-1])) for x in (q_BNSD, k_BGTD, v_BGTD))
    out = F.scaled_dot_product_attention(
        q_BNSD, k_BGTD, v_BGTD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out[..., :width]


def causal_sdpa_cpu(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float) -> Tensor:
    """Compute causal attention in blocks, [B, N, S, D], token-major in memory."""
    out: Tensor = _Causal.apply(q_BNSD, k_BGSD, v_BGSD, scale)
    return out


class _Block(NamedTuple):
    """A block of the queries from `first` to `end`, with `heads` rows each, that attend to the keys before `end`."""

    first: int
    end: int
    heads: int

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return a view of the block's rows, [B G, q R, f], of [B G, S R, f]."""
        return rows[:, self.first * self.heads : self.end * self.heads]

    def put(self, rows: Tensor, x_BGSRD: Tensor) -> None:
        """Copy the block's rows into a tensor of all tokens."""
        place = x_BGSRD[:, :, self.first : self.end]
        place.copy_(rows.view(place.shape))

    def weights(self, queries: Tensor, keys_DT: Tensor, behind: Tensor) -> Tensor:
        """Return the rows' softmax weights, fp32 [B G, q R, T]. `behind`: the causal mask within a block, [q R, q]."""
        scores = torch.bmm(self.rows_of(queries), keys_DT[..., : self.end])
        scores[..., self.first :].add_(behind[: scores.shape[1], : self.end - self.first])
        return torch.softmax(scores, dim=-1, out=scores)


def _blocks(tokens: int, heads: int) -> Sequence[_Block]:
    width = max(_ROWS // heads, 16)
    return [_Block(first, min(first + width, tokens), heads) for first in range(0, tokens, width)]


def _causal_block_mask(block: _Block, like: Tensor) -> Tensor:
    """Return the causal mask within the first block, which no block exceeds, to add to scores: 0 or -inf [q R, q]."""
    hidden = like.new_full((block.end, block.end), -torch.inf, dtype=torch.float32).triu_(1)
    return hidden.repeat_interleave(block.heads, dim=0)


def _token_major(x_BNSD: Tensor, groups: int) -> Tensor:
    """Return a token-major view of the heads of each group, [B, G, S, R, D]."""
    return x_BNSD.view(x_BNSD.shape[0], groups, -1, *x_BNSD.shape[2:]).transpose(2, 3)


def _rows(x_BNSD: Tensor, groups: int) -> Tensor:
    """Return a token-major copy of the heads of each group, [B G, S R, D]."""
    return _token_major(x_BNSD, groups).flatten(2, 3).flatten(0, 1)


def _keys(k_BGSD: Tensor, scale: float) -> Tensor:
    """Return the keys times `scale` in fp32, [B G, S, D]: their products with queries are the scores."""
    return torch.mul(k_BGSD, scale, out=k_BGSD.new_empty(k_BGSD.shape, dtype=torch.float32)).flatten(0, 1)


def _token_by_token(x_BNSD: Tensor, width: int | None = None) -> Tensor:
    """Return an empty tensor [B, N, S, width] (None: D) that is token-major in memory, as a projection reads it."""
    batch, heads, tokens, own = x_BNSD.shape
    return x_BNSD.new_empty(batch, tokens, heads, own if width is None else width).transpose(1, 2)


class _Causal(torch.autograd.Function):
    """Causal attention, one block of queries at a time.

    Forward:   p = softmax(scale q k^T + mask), out = p v
    Backward:  dv = p^T dout, ds = p (dout v^T - rowsum(p dout v^T)), dq = scale ds k, dk = scale ds^T q
    Backward starts with the last block: it covers all keys, so that its products initialise dk and dv.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        groups, tokens = k.shape[1:3]
        keep, blocks = q.dtype == torch.float32 and tokens <= _KEPT, _blocks(tokens, q.shape[1] // groups)
        rows, behind = _rows(q, groups), _causal_block_mask(blocks[0], q)
        out = _token_by_token(q, v.shape[-1])
        queries, values = rows.float(), v.float().flatten(0, 1)
        keys_DT = _keys(k, scale).mT.contiguous()  # makes matmuls of so few rows a quarter faster
        saved_weights = []
        for block in blocks:
            weights = block.weights(queries, keys_DT, behind)
            block.put(torch.bmm(weights, values[:, : block.end]), _token_major(out, groups))
            if keep:
                saved_weights.append(weights)
        ctx.save_for_backward(rows, k, v, *saved_weights)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, k, v, *saved_weights = ctx.saved_tensors
        groups, tokens = k.shape[1:3]
        blocks = _blocks(tokens, rows.shape[1] // tokens)
        queries, keys, values = rows.float(), _keys(k, ctx.scale), v.float().flatten(0, 1)
        values_DT, behind = values.mT.contiguous(), _causal_block_mask(blocks[0], k)
        keys_DT = keys.mT if saved_weights else keys.mT.contiguous()
        dout = _rows(gradients[0], groups).float()
        dq = _token_by_token(gradients[0], k.shape[-1])
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        for block in reversed(blocks):
            own, seen = block.rows_of(dout), slice(block.end)
            sum_so_far = int(block.end < tokens)  # 0: the last block covers all keys
            weights = saved_weights.pop() if saved_weights else block.weights(queries, keys_DT, behind)
            dvalues[:, seen].baddbmm_(weights.mT, own, beta=sum_so_far)
            dscores = torch.bmm(own, values_DT[..., seen])
            torch._softmax_backward_data(dscores, weights, -1, torch.float32, grad_input=dscores)
            block.put(torch.bmm(dscores, keys[:, seen]), _token_major(dq, groups))
            dkeys[:, seen].baddbmm_(dscores.mT, block.rows_of(queries), beta=sum_so_far)
        dk = _token_by_token(k)
        torch.mul(dkeys.view(k.shape), ctx.scale, out=dk)
        return dq, dk, _token_by_token(v).copy_(dvalues.view(v.shape)), None
