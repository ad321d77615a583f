"""Attention masks as blocks, and attention over them, against dense masks."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace

import pytest
import torch
from paths import ROOT

from megalaunch.engine.model.attention import block_kernels
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_kernels import fused_kernel
from megalaunch.engine.model.attention.block_mask import BlockMask, make_block_mask, positions_of
from megalaunch.engine.model.attention.mask import causal_document_mask
from megalaunch.engine.model.attention.score_mod import ScoreMod, softcap
from megalaunch.engine.model.dropout import sample_seeds
from megalaunch.engine.parallel.context_parallel import head_tail_runs

CPU = torch.device("cpu")


def _lengths(draw: random.Random, tokens: int) -> tuple[int, ...]:
    found = []
    while tokens:
        found.append(draw.randint(1, tokens))
        tokens -= found[-1]
    return tuple(found)


def _document_ids(documents: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in documents])


def _visible(mask: BlockMask, rows: int) -> torch.Tensor:
    """How often each pair of each row is in a block."""
    counts = torch.zeros(rows, sum(map(len, mask.queries)), sum(map(len, mask.keys)), dtype=torch.int64)
    for block in mask.blocks:
        pairs = torch.ones(len(block.queries), len(block.keys), dtype=torch.int64)
        pairs = {"full": pairs, "causal": pairs.tril(), "anti_causal": pairs.triu()}[block.shape]
        assert pairs.sum() == block.multiplied_pairs()
        of_rows = counts if block.row is None else counts[block.row : block.row + 1]
        of_rows[:, block.queries.start : block.queries.stop, block.keys.start : block.keys.stop] += pairs
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_blocks_hold_each_visible_pair_once(seed):
    draw = random.Random(seed)
    for _ in range(40):
        ranks, rows = draw.randint(1, 4), draw.randint(1, 2)
        tokens = 2 * ranks * draw.randint(1, 6)
        window = draw.choice([None, 1, 2, 3, 5, tokens, tokens + 3])
        documents = draw.choice([None, tuple(_lengths(draw, tokens) for _ in range(rows))])
        queries = head_tail_runs(tokens, ranks, draw.randrange(ranks))
        keys = draw.choice([head_tail_runs(tokens, ranks, draw.randrange(ranks)), (range(tokens),)])
        ids = torch.zeros(rows, tokens, dtype=torch.int64) if documents is None else _document_ids(documents)
        q, k = positions_of(queries, None), positions_of(keys, None)
        expected = causal_document_mask(q, k, ids[:, q], ids[:, k], window).squeeze(1)
        assert torch.equal(_visible(make_block_mask(queries, keys, window, documents), rows), expected.long())


@pytest.mark.parametrize("exchange", ["p2p", "allgather", "a2a", "a2a+p2p", "dynamic cp"])
def test_ranks_multiply_little_more_than_the_mask(exchange):
    """In tiles of 128 queries, at cp 4 and 8,192 tokens, as `scripts/bench attention_pairs` counts them."""
    file = ROOT / "scripts/benchmarks/attention_pairs.py"
    spec = importlib.util.spec_from_file_location("attention_pairs", file)
    assert spec is not None
    assert spec.loader is not None
    attention_pairs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attention_pairs)
    tokens, ranks = 8192, 4
    masks = attention_pairs.masks_of_ranks(exchange, tokens, ranks, None, tokens)
    heads = attention_pairs.ranks_with_other_heads(exchange, ranks)
    work = attention_pairs.count(masks, 128, heads)
    assert len(work) == ranks
    assert len(set(work)) == 1
    assert sum(attention_pairs.count(masks, 1, heads)) == tokens * (tokens + 1) / 2, "each visible pair once"
    assert sum(work) <= attention_pairs.BAR * tokens * (tokens + 1) / 2


TOKENS = 24
DOCUMENTS = ((5, 1, 11, 7), (24,))
MASKS = {
    "causal": (None, None),
    "window": (5, None),
    "documents": (None, DOCUMENTS),
    "window in documents": (3, DOCUMENTS),
}
SCORING = {
    "plain": ScoreMod(),
    "sinks": ScoreMod(0.4, sinks=torch.linspace(-1, 2, 4)),
    "capped": ScoreMod(soft_cap=1.5),
    "dropped": ScoreMod(dropout_seeds=sample_seeds(0, range(8), CPU).view(2, 4), dropout=0.4),
}


def _naive(q, k, v, allowed, scoring):
    """Attention written out, all of it kept by autograd."""
    scores = q @ k.repeat_interleave(2, 1).mT * scoring.softmax_scale(q)
    scores = scores if scoring.soft_cap is None else softcap(scores, scoring.soft_cap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    whole = make_block_mask((range(TOKENS),), (range(TOKENS),))
    kept = scoring.dropout_mask(whole.attention_mask(whole.blocks[0], CPU))
    return (weights if kept is None else weights * kept / (1 - scoring.dropout)) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("width", [8, 5])  # of values
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("seen", MASKS)
def test_output_and_gradients_are_those_of_a_dense_mask(seen, scoring, width, monkeypatch):
    monkeypatch.setattr(block_kernels, "QUERIES", 7)
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, width), (4, width))
    q, k, v, dout = (torch.randn(2, n, TOKENS, d, generator=draw) for n, d in shapes)
    window, documents = MASKS[seen]
    ids = torch.zeros(2, TOKENS, dtype=torch.int64) if documents is None else _document_ids(documents)
    everything = torch.arange(TOKENS)
    allowed = causal_document_mask(everything, everything, ids, ids, window)
    blocks = make_block_mask((range(TOKENS),), (range(TOKENS),), window, documents)
    found = []
    for attend in (lambda *x: blockwise_attention(blocks)(*x), lambda q, k, v, s: _naive(q, k, v, allowed, s)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        sinks = SCORING[scoring].sinks
        sinks = None if sinks is None else sinks.clone().requires_grad_()
        attend(*leaves, replace(SCORING[scoring], sinks=sinks)).backward(dout)
        found.append([leaf.grad for leaf in (*leaves, *(() if sinks is None else (sinks,)))])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_scores_are_computed_only_where_they_are_modified():
    q = torch.empty(1, 4, TOKENS, 8)
    fused = {name: fused_kernel(q, 8, scoring) is not None for name, scoring in SCORING.items()}
    assert fused == {"plain": True, "sinks": True, "capped": False, "dropped": False}
    assert fused_kernel(q.double(), 8, ScoreMod()) is None
