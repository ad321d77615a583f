"""The dispatcher by DeepEP, on a stand-in that exchanges over gloo: its numbers, its calls and what it refuses."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from deep_ep_stand_in import Buffer, deep_ep_module
from expert_layer import EP2, MOE, SHARED, layer_of, step
from forked_ranks import run_ranks
from oracle import hold_to_one_process, small_spec

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
