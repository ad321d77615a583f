"""LongRoPE under context parallelism: the length of the whole sample selects the factors, not that of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from forked_ranks import run_ranks
from oracle import Numbers, assert_same, hold_to_one_process, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.mesh import Axis
from megalaunch.engine.train.dataloader import MicroBatch, shard_for_context_parallel
from megalaunch.schema import RunSpec

PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True}


class Packed(oracle.RandomSamples):
    """Rows whose longest document has 16, 4, 11 and 8 tokens, in turns."""

    def __getitem__(self, index: int) -> Sample:
        lengths = ((16,), (2, 3, 4, 3, 4), (11, 5), (8, 8))[index % 4]
        documents = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return Sample(super().__getitem__(index).tokens, None, positions, documents)


def longrope(original: int, **values: Any) -> RunSpec:
    """A spec whose long factors differ much from its short ones; samples of more than `original` tokens are long."""
    rope = {
        "scaling": "longrope",
        "factor": 4.0,
        "original_positions": original,
        "short_factors": [1.0, 1.5],
        "long_factors": [3.0, 8.0],
    }
    shape = {"model__vocab_size": 64, "model__num_layers": 4, "model__init_std": 0.2}
    return small_spec(model__rope=rope, **shape, **values)


# With 12, only the rank with the ends of the samples holds a position beyond the original context.
@pytest.mark.parametrize(
    ("original", "kind"), slow_but([(12, "p2p"), (16, "p2p"), (12, "a2a")], (12, "p2p"), (16, "p2p"))
)
def test_a_length_on_each_side_of_the_original_context(original, kind):
    hold_to_one_process(longrope(original, parallel__cp=2, parallel__cp_comm_type=kind, batch__global_batch_size=4))


def _packed_on_ranks(spec: RunSpec) -> Numbers | None:
    oracle.samples_of = lambda spec: Packed()
    return on_ranks(spec, every_stage=spec.parallel.pp > 1)


@pytest.mark.parametrize(
    "layout",
    slow_but(
        [{}, {"parallel__dynamic_context_parallel": True}, {"parallel__pp": 2, "parallel__schedule": "1f1b"}],
        {},
        {"parallel__dynamic_context_parallel": True},
    ),
    ids=["cp2", "cp2 by length", "cp2 pp2"],
)
def test_packed_samples_with_long_and_short_documents_in_a_microbatch(layout):
    """The longest document of a sample selects the factors of all of it: compared with the engine's one process."""
    kind = {} if "parallel__dynamic_context_parallel" in layout else {"parallel__cp_comm_type": "allgather"}
    spec = longrope(8, parallel__cp=2, **PACKED, **layout, **kind)
    found = joined_stages(run_ranks(spec.cluster.devices_per_node, _packed_on_ranks, spec))
    assert_same(found, run_ranks(1, _packed_on_ranks, longrope(8, **PACKED))[0])


@pytest.mark.parametrize("by_length", [False, True])
def test_every_rank_knows_the_last_position_of_each_sample(by_length):
    positions = torch.stack((torch.arange(8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])))
    documents = torch.tensor([[0] * 8, [0] * 4 + [1] * 4])
    batch = MicroBatch(positions.clone(), positions + 100, positions, documents)
    for rank in range(2):
        part = shard_for_context_parallel(batch, Axis("cp", 2, rank), by_length)
        last = part.last_positions.expand_as(part.tokens)
        if not by_length:
            assert last.tolist() == [[7] * 4, [3] * 4]
        assert ((last == 7) | (last == 3)).all()
        assert (last >= part.positions).all()
    assert shard_for_context_parallel(batch, Axis("cp")) is batch
