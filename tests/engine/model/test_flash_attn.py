"""What is bound of the package flash-attn: its published signatures, which module is taken, and what it is told."""

from __future__ import annotations

import importlib.util
import inspect
import sys

import flash_attn_stand_in as stand_in
import pytest
import torch
from attention_packages import forget_packages, stand_in_for_attention_packages

from megalaunch.engine.model.attention import flash_attn
from megalaunch.engine.model.attention.core import NoContextParallel
from megalaunch.engine.model.attention.flash_attn import load_flash_attn
from megalaunch.engine.model.attention.package_attention import UnknownPackage
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.plan.attention_choice import TakenBackends

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 7, [0] * 3 + [1] * 13])


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    yield
    forget_packages()


@pytest.fixture
def hopper(monkeypatch):
    """FlashAttention 3 is installed, on a GPU of its kind."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in.flash_attn_interface_module())
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or found(name))
    monkeypatch.setattr(flash_attn, "_on_hopper", lambda: True)


def _attend(documents=None, window=None, width=16, value_width=16, **scores):
    torch.manual_seed(1)
    inputs = [torch.randn(2, heads, 16, size) for heads, size in ((4, width), (2, width), (2, value_width))]
    outputs = []
    for backend in ("flash_attn", "auto"):
        context = NoContextParallel(backends=TakenBackends(backend))
        (attend,) = context.make_attention(16, documents, [window], torch.device("cpu"))
        outputs.append(attend(*inputs, ScoreMod(0.3, **scores)))
    torch.testing.assert_close(*outputs)


def test_the_stand_in_has_the_published_signatures():
    for name, parameters in stand_in.PUBLISHED.items():
        assert tuple(inspect.signature(getattr(stand_in, name)).parameters) == parameters


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_version_2_is_told_the_window_the_cap_and_nothing_more(documents):
    _attend(documents, window=5, soft_cap=1.5)
    name = "flash_attn_func" if documents is None else "flash_attn_varlen_func"
    assert stand_in.STATE.calls == [{"name": name, "window_size": (4, 0), "softcap": 1.5, "deterministic": False}]
    assert load_flash_attn().description == "FlashAttention 2 (flash_attn 2.8.3)"


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_version_3_computes_on_hopper(documents, hopper):
    _attend(documents, window=5, soft_cap=1.5)
    name = "flash_attn_3_func" if documents is None else "flash_attn_3_varlen_func"
    assert stand_in.STATE.calls == [{"name": name, "window_size": (4, 0), "softcap": 1.5, "deterministic": False}]
    assert load_flash_attn().description == "FlashAttention 3 (flash_attn_interface)"


def test_version_3_is_not_taken_elsewhere(hopper, monkeypatch):
    monkeypatch.setattr(flash_attn, "_on_hopper", lambda: False)
    assert load_flash_attn().module == "flash_attn"


def test_heads_are_padded_to_one_width_that_the_kernels_take():
    _attend(width=12, value_width=10)
    _attend(DOCUMENTS, width=12, value_width=10)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_runs_ask_for_the_deterministic_backward_pass(deterministic):
    _attend()
    assert [call["deterministic"] for call in stand_in.STATE.calls] == [True]


def test_version_3_has_no_deterministic_backward_pass_of_wide_heads(deterministic, hopper):
    _attend(width=192, value_width=192)
    with pytest.raises(ValueError, match="deterministic backward pass of heads above 192, but head_dim is 200: use"):
        _attend(width=200, value_width=200)


def test_all_that_an_older_version_lacks_is_named(monkeypatch):
    def older(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False): ...

    module = stand_in.flash_attn_module(flash_attn_func=older)
    del module.flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with pytest.raises(UnknownPackage) as refused:
        load_flash_attn()
    assert str(refused.value) == (
        "the installed flash_attn has no flash_attn.flash_attn_func(softcap=), flash_attn.flash_attn_varlen_func; "
        "install a newer version of it, or set model.attention_backend=flash"
    )


def test_a_version_3_that_always_returns_the_log_sum_exp_is_refused(hopper, monkeypatch):
    def older(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False): ...

    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", stand_in.flash_attn_interface_module(flash_attn_func=older)
    )
    with pytest.raises(
        UnknownPackage, match=r"has no flash_attn_interface\.flash_attn_func\(return_attn_probs=\); inst"
    ):
        load_flash_attn()


def test_an_import_that_fails_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UnknownPackage, match=r"cannot be imported \(ModuleNotFoundError: .*backend=flash"):
        load_flash_attn()
