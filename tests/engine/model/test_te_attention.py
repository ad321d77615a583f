"""What is bound of Transformer Engine's attention, and what each call is told."""

from __future__ import annotations

import os
import sys

import pytest
import te_attention_stand_in as stand_in
import torch
from attention_packages import forget_packages, stand_in_for_attention_packages

from megalaunch.engine.model.attention.core import NoContextParallel
from megalaunch.engine.model.attention.package_attention import UnknownPackage, package_attention
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.model.attention.transformer_engine import load_te_attention
from megalaunch.plan.attention_choice import TakenBackends

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 7, [0] * 3 + [1] * 13])


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    yield
    forget_packages()


def _inputs(width=16, value_width=16):
    torch.manual_seed(1)
    return [torch.randn(2, heads, 16, size) for heads, size in ((4, width), (2, width), (2, value_width))]


@pytest.mark.parametrize(
    ("documents", "window", "call"),
    [
        (None, None, ("bshd", "causal", (-1, 0))),
        (None, 5, ("bshd", "causal", (4, 0))),
        (DOCUMENTS, 5, ("thd", "padding_causal", (4, 0))),
    ],
)
def test_whole_samples(documents, window, call):
    context = NoContextParallel(backends=TakenBackends("te"))
    (attend,) = context.make_attention(16, documents, [window], torch.device("cpu"))
    attend(*_inputs())
    assert stand_in.STATE.calls == [call]


def test_queries_at_the_end_of_their_keys_are_aligned_to_the_last():
    q, k, v = _inputs()
    for documents, kind in ((None, "causal"), (((9, 7), (3, 13)), "padding_causal")):
        package_attention(load_te_attention, (range(4, 8), range(8, 16)), documents, None)(q[:, :, 4:], k, v)
        package_attention(load_te_attention, (range(16),), documents, None)(q, k, v)
        assert [call[1] for call in stand_in.STATE.calls] == [f"{kind}_bottom_right"] * 2 + [kind]
        stand_in.STATE.calls.clear()


def test_heads_of_values_may_be_narrower_and_layers_are_kept():
    context = NoContextParallel(backends=TakenBackends("te"))
    for value_width in (16, 6):
        for _ in range(2):
            inputs, outputs = _inputs(16, value_width), []
            for each in (context, NoContextParallel()):
                (attend,) = each.make_attention(16, None, [None], torch.device("cpu"))
                outputs.append(attend(*inputs, ScoreMod(0.3)))
            torch.testing.assert_close(*outputs)
    assert [(layer.heads, layer.groups, layer.widths) for layer in stand_in.STATE.layers] == [
        (4, 2, (16, 16)),
        (4, 2, (16, 6)),
    ]


@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1")])
def test_operators_that_hold_all_scores_are_off_unless_asked_for(given, kept, monkeypatch):
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")
    if given is not None:
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", given)
    assert load_te_attention().description == "Transformer Engine 2.9.0"
    assert os.environ["NVTE_UNFUSED_ATTN"] == kept


def test_all_that_another_version_lacks_is_named(monkeypatch):
    class Older(stand_in.DotProductAttention):
        set_context_parallel_group = None

        def forward(self, query_layer, key_layer, value_layer, qkv_format=None, attn_mask_type=None): ...

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "DotProductAttention", Older)
    with pytest.raises(UnknownPackage) as refused:
        load_te_attention()
    lengths = ("window_size", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    missing = ", ".join(f"pytorch.DotProductAttention.forward({name}=)" for name in lengths)
    assert str(refused.value) == (
        f"the installed transformer_engine has no {missing}, pytorch.DotProductAttention.set_context_parallel_group; "
        "install another version of it, or set model.attention_backend=auto"
    )


def test_an_import_that_fails_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch")
    with pytest.raises(UnknownPackage, match=r"cannot be imported \(ModuleNotFoundError: .*backend=auto"):
        load_te_attention()
