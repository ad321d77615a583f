"""Tensor and sequence parallelism against one process: every gradient, the norm, three steps, the validation loss."""

from __future__ import annotations

from itertools import product

import pytest
from oracle import few_samples, hold_to_one_process, small_spec
from slow_cases import slow_but

VOCABULARY = 64  # divides by tp


def _held_to_one_process(dp: int, tp: int, sequence_parallel: bool, **values: object) -> None:
    values |= {"parallel__dp": dp, "parallel__tp": tp, "parallel__sequence_parallel": sequence_parallel}
    hold_to_one_process(small_spec(**few_samples({"model__vocab_size": VOCABULARY, **values})))


@pytest.mark.parametrize("sequence_parallel", slow_but([False, True], True))
@pytest.mark.parametrize("dp", slow_but([1, 2], 1))
def test_two_ranks(dp, sequence_parallel):
    _held_to_one_process(dp, 2, sequence_parallel)


@pytest.mark.parametrize("sharding", slow_but(["no_shard", "optim_grads_params"], every=["optim_grads_params"]))
def test_with_other_shardings_and_accumulation(sharding):
    _held_to_one_process(2, 2, True, parallel__data_sharding=sharding, batch__micro_batch_size=1)


@pytest.mark.slow
@pytest.mark.release  # with padded rows below
def test_tied_embeddings():
    _held_to_one_process(2, 2, True, model__tie_word_embeddings=True)


@pytest.mark.parametrize("sequence_parallel", slow_but([False, True], True, every=()))
def test_more_ranks_than_key_value_heads(sequence_parallel):
    heads = {"model__num_attention_heads": 8, "model__head_dim": 4, "model__num_query_groups": 2}
    _held_to_one_process(1, 4, sequence_parallel, **heads)


RINGS = list(product(("none", "full"), (2, 4)))


@pytest.mark.parametrize(("recomputed", "ranks"), slow_but(RINGS, ("none", 2), every=[("full", 2), ("none", 4)]))
def test_exchanges_in_a_ring(recomputed, ranks):
    heads = {"model__num_attention_heads": 8, "model__head_dim": 4, "model__num_query_groups": 2}
    _held_to_one_process(
        1,
        ranks,
        True,
        parallel__tp_comm_overlap=True,
        recompute__granularity=recomputed,
        **heads,
        batch__micro_batch_size=4,
    )


PADDED = 301  # tp 2 and 4 pad it to 512: of four ranks the third has 45 rows of tokens, and the last none


@pytest.mark.parametrize(
    ("dp", "tp", "values"),
    [
        (2, 2, {"parallel__data_sharding": "optim_grads_params", "model__tie_word_embeddings": True}),
        pytest.param(
            *(1, 4, {"model__num_attention_heads": 8, "train__loss_chunks": 3, "model__final_logit_softcapping": 20.0}),
            marks=(pytest.mark.slow, pytest.mark.release),
        ),
        pytest.param(
            1,
            2,
            {
                "parallel__pp": 2,
                "parallel__vpp": 2,
                "parallel__schedule": "interleaved",
                "model__num_layers": 4,
                "model__tie_word_embeddings": True,
            },
            marks=(pytest.mark.slow, pytest.mark.release),
        ),
        pytest.param(
            *(1, 2, {"parallel__cp": 2, "parallel__sequence_parallel": False, "model__hidden_dropout": 0.2}),
            marks=(pytest.mark.slow, pytest.mark.release),
        ),
        pytest.param(1, 2, {"parallel__tp_comm_overlap": True}, marks=pytest.mark.slow),
    ],
    ids=["zero3_tied", "chunked", "interleaved_tied", "cp", "ring"],
)
def test_a_vocabulary_that_ranks_cannot_share_out_is_padded(dp, tp, values):
    """Every gradient, the norm, three steps and the validation loss; padded rows stay zeros to the bit."""
    common = {"parallel__dp": dp, "parallel__tp": tp, "parallel__sequence_parallel": True}
    hold_to_one_process(small_spec(**few_samples({**common, "model__vocab_size": PADDED, **values})))
