"""Every data-parallel layout gives the numbers of one process, gradient by gradient."""

from __future__ import annotations

import pytest
from forked_ranks import run_ranks
from oracle import assert_same, on_ranks, one_process, small_spec
from slow_cases import slow_but

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@pytest.fixture(scope="module")
def expected():
    return one_process(small_spec())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "micro"), slow_but([(1, 8), (2, 4), (2, 1), (4, 2), (4, 1)], (1, 8), (2, 1), every=())
)
def test_layout_equals_one_process(expected, ranks, micro, strategy):
    spec = small_spec(parallel__dp=ranks, parallel__data_sharding=strategy, batch__micro_batch_size=micro)
    assert_same(run_ranks(ranks, on_ranks, spec)[0], expected)


@pytest.mark.parametrize("strategy", slow_but(STRATEGIES[1:], "optim_grads_params", every=["optim_grads"]))
def test_replicas_equal_one_process(expected, strategy):
    spec = small_spec(
        parallel__dp=4, parallel__dp_replicate=2, parallel__data_sharding=strategy, batch__micro_batch_size=1
    )
    assert_same(run_ranks(4, on_ranks, spec)[0], expected)


@pytest.mark.parametrize(("ranks", "replicas"), slow_but([(2, 1), (4, 2)], (2, 1), every=()))
@pytest.mark.parametrize("strategy", slow_but(["optim", "optim_grads", "optim_grads_params"], "optim"))
def test_without_overlap_equals_one_process(expected, ranks, replicas, strategy):
    spec = small_spec(
        parallel__dp=ranks,
        parallel__dp_replicate=replicas,
        parallel__data_sharding=strategy,
        parallel__overlap_grad_reduce=False,
        parallel__overlap_param_gather=False,
        batch__micro_batch_size=1,
    )
    assert_same(run_ranks(ranks, on_ranks, spec)[0], expected)


@pytest.mark.parametrize("strategy", slow_but(["optim", "optim_grads_params"], "optim_grads_params"))
def test_tied_embeddings_equal_one_process(strategy):
    tied = small_spec(model__tie_word_embeddings=True)
    spec = small_spec(
        model__tie_word_embeddings=True, parallel__dp=2, parallel__data_sharding=strategy, batch__micro_batch_size=2
    )
    found, expected = run_ranks(2, on_ranks, spec)[0], one_process(tied)
    assert "head.weight" not in expected.gradients
    assert_same(found, expected)
