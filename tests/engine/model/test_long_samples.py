"""Samples too long for a dense mask: the same steps as with one, in blocks, and which mask is made when."""

from __future__ import annotations

import pytest
import torch
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, on_ranks, one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.model.attention import core, mask
from megalaunch.engine.model.attention.core import DENSE_MASK_TOKENS, NO_CP, causal_attention
from megalaunch.plan.memory.profiles import ENGINE

PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True, "data__eod_mask_loss": True}
WINDOWS = {"model__sliding_window": 5, "model__sliding_window_pattern": 2}
CASES = {
    "windows in documents": PACKED | WINDOWS,
    "documents, cp2 a2a": PACKED | {"parallel__cp": 2, "parallel__cp_comm_type": "a2a"},
    "sinks and windows": WINDOWS | {"model__attention_sinks": True},
    "soft caps, dropout": {"model__attn_logit_softcapping": 2.0, "model__attention_dropout": 0.2},
}


@pytest.mark.parametrize("case", slow_but(CASES, "soft caps, dropout"))
def test_the_steps_are_those_of_a_dense_mask(case, monkeypatch):
    spec = small_spec(**CASES[case])
    expected = one_process(spec)
    monkeypatch.setattr(core, "DENSE_MASK_TOKENS", 4)
    assert_same(joined_stages(run_ranks(spec.parallel.cp, on_ranks, spec, True)), expected)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("tokens", "made"), [(16, 1), (17, 0)])
def test_a_long_sample_has_no_dense_mask(documents, tokens, made, monkeypatch):
    masks = []
    dense = mask.causal_document_mask
    monkeypatch.setattr(mask, "causal_document_mask", lambda *a: masks.append(a) or dense(*a))
    monkeypatch.setattr(core, "DENSE_MASK_TOKENS", 16)
    q, k = (torch.randn(1, heads, tokens, 4) for heads in (4, 2))
    ids = torch.arange(tokens).div(6, rounding_mode="floor")[None] if documents else None
    (attend,) = NO_CP.make_attention(tokens, ids, [5], torch.device("cpu"))
    attend(q, k, k)
    assert len(masks) == made


def test_plain_causal_attention_is_one_kernel_at_any_length(monkeypatch):
    monkeypatch.setattr(core, "DENSE_MASK_TOKENS", 4)
    monkeypatch.setattr(core, "blockwise_attention", None)
    q, k = (torch.randn(1, heads, 9, 4) for heads in (4, 2))
    assert causal_attention(q, k, k).shape == q.shape


def test_the_planner_counts_a_mask_up_to_the_same_length():
    assert ENGINE.dense_mask_tokens == DENSE_MASK_TOKENS
