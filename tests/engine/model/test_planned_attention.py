"""The planner's attention term for context parallelism, against the blocks that the engine computes."""

from __future__ import annotations

import pytest
from made_specs import resolved

from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.parallel.context_parallel import head_tail_runs
from megalaunch.plan.cost.attention import attention_kernel
from megalaunch.plan.cost.stacks import engine_stack

LENGTH = 8192


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_planned_pairs_and_merges_are_those_of_the_ring(cp):
    spec, _ = resolved(
        "model=llama3_8b", f"parallel=cp{cp}", "platform=h100", "cluster.nodes=1", "cluster.devices_per_node=8",
        f"batch.sequence_length={LENGTH}", "batch.global_batch_size=8", "train.steps=1", "precision=bf16",
    )  # fmt: skip
    kernel = attention_kernel(spec, engine_stack(spec), None)
    shards = [head_tail_runs(LENGTH, cp, rank) for rank in range(cp)]
    for own in shards:
        blocks = [block for keys in shards for block in make_block_mask(own, keys).blocks]
        multiplied = sum(block.multiplied_pairs(128) for block in blocks)  # whole tiles of 128 queries on the diagonal
        planned = LENGTH / cp * LENGTH / 2
        assert not kernel.all_pairs
        assert planned <= multiplied <= 1.05 * planned
        merged = sum(len(block.queries) for block in blocks) / (LENGTH / cp)
        assert merged == pytest.approx(kernel.merges, rel=0.35)
    total = sum(len(b.queries) for own in shards for keys in shards for b in make_block_mask(own, keys).blocks)
    assert total / LENGTH == pytest.approx(kernel.merges, rel=0.02)
