"""Attention backend `math` on both sides of the longest sample with a dense mask: its numbers, and what it holds."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from slow_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.model.attention import backends, core
from megalaunch.engine.model.attention.backends import SampleMask
from megalaunch.engine.model.attention.core import NoContextParallel
from megalaunch.engine.model.attention.score_mod import AttentionFn, ScoreMod
from megalaunch.engine.model.attention.unfused_attention import unfused_attention
from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.plan.attention_choice import TakenBackends

SHORT, LONG = DENSE_MASK_TOKENS, DENSE_MASK_TOKENS + 200
BOUND = 640  # in place of it where numbers are compared; the lengths are no multiples of a block of queries
DROPOUT = {"dropout_seeds": torch.tensor([[3, 5], [7, 9]]), "dropout": 0.3}
SCORES = {
    "plain": {},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": 1.5},
    "dropout": DROPOUT,
    "all": {"sinks": True, "soft_cap": 1.5, **DROPOUT},
}
MASKS = {"causal": (False, None), "window": (False, 300), "documents": (True, None), "both": (True, 300)}


def _documents(length: int) -> torch.Tensor:
    """The document ids of two rows, whose documents end within blocks of queries and at the ends of some."""
    rows = torch.zeros(2, length, dtype=torch.int64)
    for row, starts in enumerate(((5, 512, 700), (600,))):
        for start in starts:
            rows[row, start:] += 1
    return rows


def _made(length: int, mask: str) -> AttentionFn:
    """The attention that layers without context parallelism are built with."""
    has_documents, window = MASKS[mask]
    documents = _documents(length) if has_documents else None
    context = NoContextParallel(backends=TakenBackends("math"))
    return context.make_attention(length, documents, [window], torch.device("cpu"))[0]


def _dense(length: int, mask: str) -> AttentionFn:
    """Attention with all scores and one mask of all pairs."""
    has_documents, window = MASKS[mask]
    documents = _documents(length) if has_documents else None
    allowed = SampleMask(length, documents, None, window).dense(torch.device("cpu"))
    return lambda q, k, v, scoring: unfused_attention(q, k, v, allowed, scoring)


def _results(attend: AttentionFn, length: int, sinks: bool = False, **scores: object) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys, values and sinks."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, heads, length, width) for heads, width in ((2, 8), (1, 8), (1, 6))]
    inputs += [torch.randn(2)] if sinks else []
    inputs = [x.requires_grad_() for x in inputs]
    out = attend(*inputs[:3], ScoreMod(0.3, sinks=inputs[3] if sinks else None, **scores))
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


CASES = list(product((BOUND, BOUND + 460), SCORES, MASKS))
QUICK = [case for case in CASES if case[1:] in (("plain", "causal"), ("all", "both"))]


@pytest.mark.parametrize(("length", "scores", "mask"), slow_but(CASES, *QUICK))
def test_both_sides_of_the_bound_compute_what_a_dense_mask_does(length, scores, mask, monkeypatch):
    for module in (backends, core):
        monkeypatch.setattr(module, "DENSE_MASK_TOKENS", BOUND)
    found, expected = (_results(made(length, mask), length, **SCORES[scores]) for made in (_made, _dense))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


class _Masks(TorchDispatchMode):
    """Notes the queries and keys of every mask that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.ndim > 1:
            self.shapes.add(tuple(out.shape[-2:]))
        return out


@pytest.mark.parametrize("mask", slow_but(MASKS, "documents"))
def test_a_long_sample_has_no_mask_and_saves_no_weights_of_all_pairs(mask):
    queries, saved = {}, {}
    for length in (SHORT, LONG):
        kept: list[int] = []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x)
        with _Masks() as masks, keep:
            _results(_made(length, mask), length, sinks=True, soft_cap=1.5)
        queries[length], saved[length] = max(queries for queries, _ in masks.shapes), max(kept)
    assert queries[SHORT] == SHORT
    assert queries[LONG] <= 512
    assert saved[SHORT] >= 2 * 2 * SHORT**2
    assert saved[LONG] <= 2 * 2 * LONG * 8
