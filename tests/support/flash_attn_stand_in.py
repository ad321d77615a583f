"""A stand-in for the package flash-attn: its functions with the published signatures, in plain torch on CPUs.

Signatures, and what callers are held to, are those of the sources: of FlashAttention 2, flash_attn_interface.py and
csrc/flash_attn/flash_api.cpp at 2.6 and 2.8.3; of FlashAttention 3, hopper/flash_attn_interface.py and
hopper/flash_api.cpp at 2.8.4. Both align a causal mask and a window to the last query and key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# The parameters of the functions of FlashAttention 2 (2.6 to 2.8.4) and FlashAttention 3.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "flash_attn_func": (
        "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
        "deterministic", "return_attn_probs",
    ),
    "flash_attn_varlen_func": (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale",
        "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table",
    ),
    "flash_attn_3_func": (
        "q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size",
        "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs",
    ),
    "flash_attn_3_varlen_func": (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k",
        "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size", "attention_chunk",
        "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs",
    ),
}  # fmt: skip


@dataclass
class State:
    """What the stand-in was asked for."""

    calls: list[dict[str, Any]] = field(default_factory=list)


STATE = State()


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not return_attn_probs
    _note("flash_attn_func", window_size, softcap, deterministic)
    return _dense(q, k, v, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert block_table is None
    assert not return_attn_probs
    _note("flash_attn_varlen_func", window_size, softcap, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _varlen(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)


def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    _note("flash_attn_3_func", window_size, softcap, deterministic)
    return _dense(q, k, v, softmax_scale, causal, window_size, softcap)


def flash_attn_3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    _note("flash_attn_3_varlen_func", window_size, softcap, deterministic)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _varlen(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)


def _note(name: str, window_size: tuple[int, int], softcap: float, deterministic: bool) -> None:
    STATE.calls.append({"name": name, "window_size": window_size, "softcap": softcap, "deterministic": deterministic})


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    assert [x.dim() for x in (q, k, v)] == [4, 4, 4]
    _check(q, k, v)
    return torch.stack([aligned_attention(*row, scale, causal, window, softcap) for row in zip(q, k, v, strict=True)])


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    assert [x.dim() for x in (q, k, v)] == [3, 3, 3]
    _check(q, k, v)
    return pieces_attention(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, softcap)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What flash_api.cpp checks of inputs."""
    assert q.dtype == k.dtype == v.dtype
    assert [x.stride(-1) for x in (q, k, v)] == [1, 1, 1], "Input tensor must have contiguous last dimension"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0, "must have a head_size that is a multiple of 8"
    assert q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0


def pieces_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Attention within pieces of [tokens, heads, width], by their cumulative lengths."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.shape == cu_k.shape
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
    lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k)
    pieces = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    return torch.cat([aligned_attention(*piece, scale, causal, window, softcap) for piece in pieces])


def aligned_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    """Attention of [S, N, D] over [T, G, D], its mask aligned to the last query and key."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q.float(), k.float()) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(len(q))[:, None] + len(k) - len(q)
    distance = row - torch.arange(len(k))[None]
    left, right = window
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= left) if left >= 0 else True
    seen &= (distance >= -right) if right >= 0 else True
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("nst,tnd->snd", weights, v.float()).to(q.dtype)


def flash_attn_module(**replaced: Callable[..., Any]) -> ModuleType:
    """FlashAttention 2's module, with functions replaced."""
    return _module("flash_attn", "2.8.3", flash_attn_func, flash_attn_varlen_func, replaced)


def flash_attn_interface_module(**replaced: Callable[..., Any]) -> ModuleType:
    """FlashAttention 3's module, with functions replaced; it has no version."""
    return _module("flash_attn_interface", None, flash_attn_3_func, flash_attn_3_varlen_func, replaced)


def _module(
    name: str, version: str | None, dense: Callable, varlen: Callable, replaced: dict[str, Callable[..., Any]]
) -> ModuleType:
    module = ModuleType(name)
    if version is not None:
        module.__version__ = version
    for each, function in {"flash_attn_func": dense, "flash_attn_varlen_func": varlen, **replaced}.items():
        setattr(module, each, function)
    return module
