"""Attention over the keys of one rank after another: the sums of all parts against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
from slow_cases import slow_but
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex_attention

from megalaunch.engine.model.attention import flex_attention
from megalaunch.engine.model.attention.block_mask import make_block_mask, positions_of
from megalaunch.engine.model.attention.core import NO_CP
from megalaunch.engine.model.attention.flex_attention import FlexMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.partial_attention import BlockwisePart, FlexPart, PartialAttention
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.parallel.context_parallel import head_tail_runs

RANKS, TOKENS, WIDTH = 2, 24, 16
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 10 + [2] * 5, [0] * 3 + [1] * 21])
LENGTHS = ((9, 10, 5), (3, 21))
MASKS = {"causal": (None, None), "window": (None, 5), "documents": (DOCUMENTS, None), "both": (DOCUMENTS, 5)}
SCORES = {"plain": {}, "sinks": {"sinks": True}, "cap": {"soft_cap": 1.5}, "both": {"sinks": True, "soft_cap": 1.5}}
OWN = [head_tail_runs(TOKENS, RANKS, rank) for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def flex_backward_on_cpu(monkeypatch):
    """torch refuses gradients of FlexAttention on a CPU before it computes them operator by operator."""
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *tensors: None)


def _parts(kind: str, mask: str, rank: int) -> list[PartialAttention]:
    """Return attention of a rank's queries over the keys of each rank."""
    documents, window = MASKS[mask]
    if kind == "flex":
        return [FlexPart(FlexMask(OWN[rank], keys, documents, window)) for keys in OWN]
    lengths = None if documents is None else LENGTHS
    return [BlockwisePart(make_block_mask(OWN[rank], keys, window, lengths)) for keys in OWN]


def _inputs() -> tuple[Tensor, ...]:
    """Return queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, heads, TOKENS, WIDTH, generator=generator) for heads in (4, 2, 2, 4))


def _by_parts(kind: str, mask: str, scoring: ScoreMod) -> list[Tensor]:
    """Return the output and gradients that all ranks compute together: their own keys first, as in a ring."""
    q, k, v, dout = _inputs()
    out, sums = torch.empty_like(q), [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(RANKS):
        places = [positions_of(tokens, q.device) for tokens in OWN]
        own, parts = places[rank], _parts(kind, mask, rank)
        merged = OnlineSoftmax.empty(q[:, :, own], WIDTH, scoring.sinks)
        turns = [(rank + turn) % RANKS for turn in range(RANKS)]
        for owner in turns:
            parts[owner].add_output(merged, q[:, :, own], k[:, :, places[owner]], v[:, :, places[owner]], scoring)
        out[:, :, own] = merged.output
        shared = BlockwiseBackward(merged.output, dout[:, :, own], merged.log_sum)
        for owner in turns:
            seen = q[:, :, own], k[:, :, places[owner]], v[:, :, places[owner]]
            found = [torch.zeros_like(x) for x in seen]
            parts[owner].add_gradients(seen, scoring, shared, *found)
            for total, tokens, part in zip(sums, (own, places[owner], places[owner]), found, strict=True):
                total[:, :, tokens] += part
    return [out, *sums]


def _at_once(mask: str, scoring: ScoreMod) -> list[Tensor]:
    """Return the output and gradients of attention over all keys."""
    documents, window = MASKS[mask]
    *leaves, dout = _inputs()
    leaves = [x.requires_grad_() for x in leaves]
    (attend,) = NO_CP.make_attention(TOKENS, documents, [window], dout.device)
    out = attend(*leaves, scoring)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


CASES = [(kind, scores, mask) for kind in ("blocks", "flex") for scores in SCORES for mask in MASKS]
QUICK = [case for case in CASES if "blocks" in case or case in (("flex", "both", "both"), ("flex", "plain", "causal"))]


@pytest.mark.parametrize(("kind", "scores", "mask"), slow_but(CASES, *QUICK))
def test_parts_add_up_to_attention_over_all_keys(kind, scores, mask):
    given = SCORES[scores]
    scoring = ScoreMod(0.3, given.get("soft_cap"), torch.linspace(-1, 1, 4) if "sinks" in given else None)
    for found, expected in zip(_by_parts(kind, mask, scoring), _at_once(mask, scoring), strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_one_graph_serves_the_keys_of_all_ranks_in_both_passes(monkeypatch):
    """A graph for each rank would exceed the limit of torch.compile, beyond which all scores are held."""
    compiled = CompileCounterWithBackend("aot_eager")
    operator = torch.compile(torch_flex_attention.flex_attention, backend=compiled, dynamic=False)
    monkeypatch.setattr(flex_attention, "flex_operator", lambda q: operator)
    _by_parts("flex", "causal", ScoreMod(0.3, 1.5))
    assert compiled.frame_count == 1
