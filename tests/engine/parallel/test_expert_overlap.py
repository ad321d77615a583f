"""The exchange of tokens overlaps with the shared experts and with the other half of a microbatch; numbers stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expert_layer import EP2, MOE, SHARED, layer_of, step
from forked_ranks import run_ranks
from oracle import hold_to_one_process, small_spec

from megalaunch.engine.model.moe.dispatcher import Exchange
from megalaunch.engine.parallel.expert_parallel import AllGatherDispatcher, AllToAllDispatcher

slow = pytest.mark.slow
RELEASE = (pytest.mark.slow, pytest.mark.release)


@dataclass
class Sequential:
    """A dispatcher that waits at once."""

    inner: AllToAllDispatcher | AllGatherDispatcher
    parts: int = 1

    def dispatch(self, *given: Any) -> Exchange[Any]:
        dispatched = self.inner.dispatch(*given).wait()
        return Exchange(lambda: dispatched)

    def combine(self, *given: Any) -> Exchange[Any]:
        combined = self.inner.combine(*given).wait()
        return Exchange(lambda: combined)


def test_the_exchange_overlaps_with_the_shared_experts():
    """Dispatch with their first half and combine with their second one, in both passes; not a bit changes."""

    def body() -> None:
        layer, blocks = layer_of(SHARED)
        for dispatcher in (AllToAllDispatcher(blocks), AllGatherDispatcher(blocks)):
            expected, _, _ = step(layer, Sequential(dispatcher))
            found, forward, backward = step(layer, dispatcher)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
            if isinstance(dispatcher, AllToAllDispatcher):
                assert forward == backward == ["send", "shared", "wait", "experts", "send", "shared", "wait"]

    run_ranks(2, body)


def test_the_exchange_of_a_half_overlaps_with_the_experts_of_the_other():
    def body() -> None:
        layer, blocks = layer_of(MOE)
        expected, _, _ = step(layer, AllToAllDispatcher(blocks))
        found, forward, backward = step(layer, AllToAllDispatcher(blocks, parts=2))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        first_half = ["send", "send", "wait", "experts", "send"]
        assert forward == backward == [*first_half, "wait", "experts", "send", "wait", "wait"]

    run_ranks(2, body)


PIPELINE = {**EP2, "parallel__pp": 2, "model__num_layers": 4, "batch__micro_batch_size": 1}


@pytest.mark.parametrize(
    ("moe", "layout"),
    [
        pytest.param(SHARED, EP2, id="shared"),
        pytest.param(SHARED, {**EP2, "recompute__granularity": "full"}, id="recomputed", marks=slow),
        pytest.param(MOE, {**PIPELINE, "parallel__schedule": "1f1b"}, id="1f1b", marks=RELEASE),
        pytest.param(
            MOE, {**PIPELINE, "parallel__schedule": "zero_bubble", "parallel__vpp": 2}, id="zero bubble", marks=slow
        ),
        pytest.param(
            MOE,
            {**PIPELINE, "parallel__schedule": "zbv", "parallel__vpp": 2},
            id="zbv",
            marks=RELEASE,
        ),
    ],
)
def test_halves_equal_one_process(moe, layout):
    values = {"model__vocab_size": 64, "parallel__overlap_moe_expert_parallel_comm": True}
    hold_to_one_process(small_spec(**values, model__moe=moe, **layout))
