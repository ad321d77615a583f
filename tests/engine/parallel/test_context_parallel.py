"""Context parallelism against one process, by each exchange; alone, with data, tensor and sequence parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import few_samples, hold_to_one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.mesh import Axis, make_mesh
from megalaunch.engine.model.attention.core import NO_CP
from megalaunch.engine.parallel.context_parallel import ContextParallel, cp_positions
from megalaunch.plan.topology import Topology

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCABULARY = 64  # divides by tp
EXCHANGES = ("p2p", "allgather", "a2a")
EIGHT_HEADS = {"model__num_attention_heads": 8, "model__head_dim": 4, "model__num_query_groups": 2}


def _held_to_one_process(dp: int, cp: int, tp: int, exchange: object, **values: object) -> None:
    values |= {"parallel__dp": dp, "parallel__cp": cp, "parallel__tp": tp, "parallel__cp_comm_type": exchange}
    hold_to_one_process(small_spec(**few_samples({"model__vocab_size": VOCABULARY, **values})))


def test_an_early_chunk_goes_with_a_late_one():
    assert [cp_positions(8, Axis("cp", 2, rank)).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_ranks(exchange):
    _held_to_one_process(1, 2, 1, exchange)


@pytest.mark.parametrize("exchange", slow_but(EXCHANGES, every=["p2p", "a2a"]))
def test_more_ranks_than_key_value_heads(exchange):
    _held_to_one_process(1, 4, 1, exchange, **EIGHT_HEADS)


@pytest.mark.parametrize("sharding", slow_but(["no_shard", "optim_grads_params"], every=["optim_grads_params"]))
def test_with_data_parallelism(sharding):
    _held_to_one_process(2, 2, 1, "allgather", parallel__data_sharding=sharding)


@pytest.mark.parametrize("exchange", slow_but(EXCHANGES, "a2a", every=["p2p"]))
def test_with_tensor_and_sequence_parallelism(exchange):
    _held_to_one_process(1, 2, 2, exchange, parallel__sequence_parallel=True, **EIGHT_HEADS)


@pytest.mark.parametrize("packed", slow_but([False, True], True, every=()))
def test_two_levels(packed):
    _held_to_one_process(
        1,
        4,
        1,
        "a2a+p2p",
        parallel__hierarchical_context_parallel_sizes=(2, 2),
        data__reset_attention_mask=packed,
        **EIGHT_HEADS,
    )


@pytest.mark.slow
@pytest.mark.release
def test_two_levels_of_unlike_size_with_tensor_parallelism():
    _held_to_one_process(
        1, 4, 2, ["a2a+p2p", "p2p", "a2a+p2p"], parallel__hierarchical_context_parallel_sizes=(4, 1), **EIGHT_HEADS
    )


def test_a_way_for_each_layer():
    _held_to_one_process(1, 2, 1, ["a2a", "p2p", "allgather"])


def _packed(exchange: str) -> tuple[torch.Tensor, ...]:
    """This rank's tokens of the output and gradients under an exchange, less those of attention over whole samples."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 16, 4, generator=generator) for n in (4, 2, 2, 4))
    documents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4]).expand(2, -1)
    axis = make_mesh(
        Topology.from_spec(small_spec(parallel__dp=1, parallel__cp=4)), torch.device("cpu"), dist.get_rank()
    ).cp
    positions = cp_positions(16, axis)
    context = ContextParallel(axis, (exchange,))
    results = []
    for parts, attend in (
        (
            [x[:, :, positions] for x in (q, k, v)],
            context.make_attention(4, documents[:, positions], [None], documents.device)[0],
        ),
        ([q, k, v], NO_CP.make_attention(16, documents, [None], documents.device)[0]),
    ):
        leaves = [part.clone().requires_grad_() for part in parts]
        out = attend(*leaves)
        out.backward(dout if out.shape == dout.shape else dout[:, :, positions])
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return tuple(mine - whole[:, :, positions] for mine, whole in zip(*results, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_packed_documents_do_not_see_each_other(exchange):
    for differences in run_ranks(4, _packed, exchange):
        assert max(abs(difference).max() for difference in differences) < 1e-5
