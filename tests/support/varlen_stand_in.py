"""A CPU stand-in for the two operators that torch's varlen_attn calls on CUDA, in fp64 from exactly their arguments.

torch's own function, its registered operators and their autograd run as on a GPU. What the stand-in asks of its inputs
is what aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp checks in torch 2.13; masks are aligned to the
last query and key of a piece, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Calls:
    """How often each operator was called, and the windows that it was given."""

    forward: list[tuple[int | None, int | None]] = field(default_factory=list)
    backward: list[tuple[int | None, int | None]] = field(default_factory=list)


@contextmanager
def varlen_on_cpu() -> Iterator[Calls]:
    """Within the context the operators compute on a CPU; return what they were called with."""
    calls = Calls()

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
        window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        calls.forward.append((window_size_left, window_size_right))
        _check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
        out, log_sum = torch.empty_like(q), torch.empty(q.shape[1], len(q))
        for own, seen in _pieces(cu_q, cu_k):
            scores = _scores(q[own], k[seen], scale, causal, window_size_left, window_size_right)
            log_sum[:, own] = scores.logsumexp(-1).float()
            weights = scores.softmax(-1)
            out[own] = torch.einsum("nst,tnd->snd", weights, _for_heads(v[seen], q)).to(q.dtype)
        unused = torch.empty(2, dtype=torch.uint64)
        return out, log_sum, unused, unused.clone(), torch.empty(0)

    def backward(
        dout, q, k, v, out, log_sum, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        calls.backward.append((window_size_left, window_size_right))
        _check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
        assert log_sum.dtype == torch.float32
        assert log_sum.shape == (q.shape[1], len(q))
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
        for own, seen in _pieces(cu_q, cu_k):
            keys, values, upstream = _for_heads(k[seen], q), _for_heads(v[seen], q), dout[own].double()
            scores = _scores(q[own], k[seen], scale, causal, window_size_left, window_size_right)
            weights = (scores - log_sum[:, own, None].double()).exp()
            share = (upstream * out[own].double()).sum(-1).T[..., None]
            dscores = weights * (torch.einsum("snd,tnd->nst", upstream, values) - share) * scale
            dq[own] += torch.einsum("nst,tnd->snd", dscores, keys)
            dk[seen] += _of_groups(torch.einsum("nst,snd->tnd", dscores, q[own].double()), k)
            dv[seen] += _of_groups(torch.einsum("nst,snd->tnd", weights, upstream), v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float) -> None:
    assert [x.dim() for x in (q, k, v)] == [3, 3, 3]
    assert q.dtype == k.dtype == v.dtype
    assert [x.stride(-1) for x in (q, k, v)] == [1, 1, 1], "Input tensor must have contiguous last dimension"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0, "must have a head_size that is a multiple of 8"
    assert q.shape[1] % k.shape[1] == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    assert cu_q.shape == cu_k.shape
    assert (int(cu_q[0]), int(cu_k[0]), int(cu_q[-1]), int(cu_k[-1])) == (0, 0, len(q), len(k))
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    assert dropout == 0.0


def _pieces(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each piece."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for first, stop, start, end in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        yield slice(first, stop), slice(start, end)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Scores of a piece, fp64 [N, S, T], hidden ones -inf."""
    scores = torch.einsum("snd,tnd->nst", q.double(), _for_heads(k, q)) * scale
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= distance <= left
    if right is not None and right >= 0:
        seen &= distance >= -right
    return scores.masked_fill(~seen, -torch.inf)


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _of_groups(gradient_TND: Tensor, like: Tensor) -> Tensor:
    return gradient_TND.view(len(gradient_TND), like.shape[1], -1, like.shape[-1]).sum(2)
