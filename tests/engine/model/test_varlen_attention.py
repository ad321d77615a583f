"""Packed documents by torch's varlen_attn: what its operators are called with, against blocks of each document."""

from __future__ import annotations

import pytest
import torch
from varlen_stand_in import varlen_on_cpu

from megalaunch.engine.model.attention.core import NoContextParallel
from megalaunch.engine.model.attention.package_attention import Pieces
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.model.attention.varlen_attention import VarlenAttention, load_varlen_attention
from megalaunch.plan.attention_choice import TakenBackends

TOKENS = 24
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 10 + [2] * 5, [0] * 3 + [1] * 21])


def _results(backend, documents, window, width=16, values_width=16) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values, of two groups of two heads."""
    torch.manual_seed(1)
    sizes = ((4, width), (2, width), (2, values_width))
    inputs = [torch.randn(2, TOKENS, heads, size).transpose(1, 2).requires_grad_() for heads, size in sizes]
    (attend,) = NoContextParallel(backends=TakenBackends(backend)).make_attention(
        TOKENS, documents, [window], torch.device("cpu")
    )
    out = attend(*inputs, ScoreMod(0.3))
    upstream = torch.linspace(-1, 2, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(
    ("documents", "window", "sizes"),
    [
        (DOCUMENTS, None, {}),
        (DOCUMENTS, 5, {}),
        (DOCUMENTS, None, {"width": 12, "values_width": 10}),
        (None, 5, {}),
    ],
    ids=["documents", "windows", "padded heads", "no documents"],
)
def test_one_call_computes_all_documents(documents, window, sizes):
    with varlen_on_cpu() as calls:
        found = _results("varlen", documents, window, **sizes)
    asked = [(-1 if window is None else window - 1, 0)]
    assert (calls.forward, calls.backward) == (asked, asked)
    for value, expected in zip(found, _results("flash", documents, window, **sizes), strict=True):
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_scores_that_are_modified_are_refused():
    (attend,) = NoContextParallel(backends=TakenBackends("varlen")).make_attention(
        TOKENS, DOCUMENTS, [None], torch.device("cpu")
    )
    inputs, scoring = [torch.randn(2, 4, TOKENS, 16)] * 3, ScoreMod(soft_cap=2.0, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="computes no soft cap and sinks: use auto"):
        attend(*inputs, scoring)


def test_older_versions_are_called_with_the_arguments_that_they_have():
    asked = {}

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        asked.update(query=query, is_causal=is_causal, lengths=(cu_seq_q.tolist(), max_q, max_k))
        return query

    kernel = VarlenAttention(older, frozenset({"is_causal"}))
    q, k = torch.ones(8, 4, 16), torch.ones(8, 2, 16)
    pieces = Pieces((3, 5), (3, 5), q.device)
    kernel.attend_pieces(q, k, k, pieces, None, ScoreMod(0.5))
    assert asked["is_causal"]
    assert asked["lengths"] == ([0, 3, 8], 5, 5)
    assert torch.equal(asked["query"], 2 * q)  # times 0.5, over its own scale of 1 / sqrt(16)
    with pytest.raises(ValueError, match=r"has no sliding windows: set model\.attention_backend=flex"):
        kernel.attend_pieces(q, k, k, pieces, 2, ScoreMod(0.5))


def test_this_torch_has_all_that_is_asked_for():
    assert {"window_size", "scale", "enable_gqa"} <= load_varlen_attention().arguments
