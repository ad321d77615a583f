"""The dispatcher by DeepEP, on a stand-in that exchanges over gloo: its numbers, its calls and what it refuses."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from deep_ep_stand_in import Buffer, deep_ep_module
from expert_layer import EP2, MOE, SHARED, layer_of, step
from float8_runs import assert_close, float8_spec, run
from forked_ranks import run_ranks
from oracle import hold_to_one_process, on_ranks, small_spec
from slow_cases import slow_but
from transformer_engine_runs import install_stand_in, library_spec, run_by_library

from megalaunch.engine.parallel.deep_ep import DeepEPDispatcher, UnknownDeepEP, load_buffer_class
from megalaunch.engine.parallel.expert_parallel import AllToAllDispatcher

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep_module())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("moe", [SHARED, {**MOE, "capacity_factor": 0.7}], ids=["shared", "dropped pairs"])
def test_gradients_equal_those_of_the_all_to_all(moe, parts):
    def body() -> None:
        layer, blocks = layer_of(moe)
        expected, _, _ = step(layer, AllToAllDispatcher(blocks, parts=parts))
        buffer = Buffer(dist.group.WORLD, 1)
        found, _, _ = step(layer, DeepEPDispatcher(blocks, buffer, parts))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()
        assert buffer.calls == [
            *["dispatch"] * parts, *["combine"] * parts, *["dispatch by handle"] * parts,
            *["combine with weights"] * parts,
        ]  # fmt: skip
        assert all(event.waited for event in buffer.events)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("moe", "layout"),
    [
        pytest.param(MOE, EP2, id="ep2"),
        pytest.param(MOE, {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__ep": 2}, id="tp2 ep2",
                     marks=slow),
        pytest.param(MOE, {"parallel__dp": 4, "parallel__ep": 4}, id="ep4", marks=slow),
        pytest.param(SHARED, {**EP2, "recompute__granularity": "full",
                              "parallel__overlap_moe_expert_parallel_comm": True}, id="recomputed halves", marks=slow),
    ],
)  # fmt: skip
def test_layouts_equal_one_process(moe, layout):
    values = {"model__vocab_size": 64, "parallel__moe_token_dispatcher_type": "flex"}
    hold_to_one_process(small_spec(**values, model__moe=moe, **layout))


FLOAT8 = {"model__moe": {**MOE, "ffn_hidden_size": 16}, "model__num_layers": 1}
FLEX = {"dp": 2, "ep": 2, "moe_token_dispatcher_type": "flex"}


@pytest.mark.parametrize("recipe", slow_but(["tensorwise", "delayed", "rowwise"], "delayed"))
def test_experts_in_fp8_have_the_numbers_of_the_all_to_all(recipe):
    """The rows of an expert are the same, in another order: so are its scales."""
    other = {**FLEX, "moe_token_dispatcher_type": "alltoall"}
    assert_close(run(float8_spec(FLEX, recipe, **FLOAT8)), run(float8_spec(other, recipe, **FLOAT8)))


@slow
def test_experts_of_transformer_engine_have_the_numbers_of_the_all_to_all(monkeypatch):
    install_stand_in(monkeypatch)
    flex, other = (
        run_by_library(library_spec({**FLEX, "moe_token_dispatcher_type": dispatcher}, **FLOAT8)).numbers
        for dispatcher in ("flex", "alltoall")
    )
    assert_close(flex, other)


def test_tokens_of_experts_in_fp8_are_sent_in_bf16(monkeypatch):
    """The only dtype of the kernels that are called here."""

    exchange = Buffer._exchange

    def exchange_in_bf16(self, rows, sent, received):
        assert rows.shape[-1] != 32 or rows.dtype == torch.bfloat16, "32: the hidden size"
        return exchange(self, rows, sent, received)

    monkeypatch.setattr(Buffer, "_exchange", exchange_in_bf16)
    run_ranks(2, on_ranks, float8_spec(FLEX, "tensorwise", **FLOAT8))


def test_a_rank_without_tokens():
    """All tokens go to the experts of rank 0: the other rank receives none, and still takes part in backward."""

    def body() -> None:
        layer, blocks = layer_of({**MOE, "router_bias": True})
        assert layer.router.bias is not None
        layer.router.bias.data[:2] = 1e4
        expected, _, _ = step(layer, AllToAllDispatcher(blocks))
        found, _, _ = step(layer, DeepEPDispatcher(blocks, Buffer(dist.group.WORLD, 1)))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6 * max(1e-30, theirs.abs().max())

    run_ranks(2, body)


def test_what_another_version_lacks_is_named(monkeypatch):
    class Older(Buffer):
        capture = None

        def combine(self, x, handle, previous_event=None, async_finish=False): ...

    monkeypatch.setattr(sys.modules["deep_ep"], "Buffer", Older)
    with pytest.raises(UnknownDeepEP) as refused:
        load_buffer_class()
    for name in ("Buffer.capture", "Buffer.combine(topk_weights=)", "Buffer.combine(allocate_on_comm_stream=)"):
        assert name in str(refused.value)
    assert "moe_token_dispatcher_type=alltoall" in str(refused.value)
