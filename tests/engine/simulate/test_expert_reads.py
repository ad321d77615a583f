"""Experts on GPUs, in every precision format: a simulated step notes whether the host reads their row counts."""

from __future__ import annotations

import pytest
from host_syncs import SimulatedReads
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.engine.simulate import deep_plan as simulation

MODEL = (
    *("model=mixtral_8x7b", "model.num_layers=2", "model.hidden_size=256", "model.ffn_hidden_size=512"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=64", "model.vocab_size=512"),
    *("batch.sequence_length=256", "batch.micro_batch_size=1", "batch.global_batch_size=4", "train.steps=10"),
)
LAYOUTS = {
    "one rank": ("parallel=dp", "cluster.devices_per_node=1"),
    "etp2": ("parallel=etp2", "cluster.devices_per_node=2"),
    "etp2 by all-gather": (
        *("parallel=etp2", "cluster.devices_per_node=2", "parallel.moe_token_dispatcher_type=allgather"),
    ),
    "recomputed": ("parallel=dp", "cluster.devices_per_node=1", "recompute=full"),
    "a capacity": ("parallel=dp", "cluster.devices_per_node=1", "model.moe.capacity_factor=1.0"),
}
CASES = [
    *((precision, "one rank") for precision in ("bf16", "fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise")),
    *(("mxfp8", "one rank"), ("fp8_blockwise", "etp2"), ("bf16", "etp2 by all-gather")),
    *(("fp8", "recomputed"), ("fp8_delayed", "a capacity")),
]
STEP_READS = {"rank_sync.py:total_valid_tokens", "rank_sync.py:reduce_step_stats", "load.py:from_sums"}


def _reads(precision: str, layout: tuple[str, ...]) -> set[str]:
    platform = "b200" if precision == "mxfp8" else "h100"
    overrides = (*MODEL, f"platform={platform}", "cluster.nodes=1", f"precision={precision}", *layout)
    simulation.deep_plan(resolved(*overrides)[0], 0)
    return set(SimulatedReads.found)


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    even = simulation.busiest_row_counts

    def make_reader(spec):
        split = even(spec)

        def read(counts, total):
            SimulatedReads.found.append("row counts")
            return split(counts, total)

        return read

    monkeypatch.setattr(SimulatedReads, "found", [])
    monkeypatch.setattr(simulation, "SimulatedOperators", SimulatedReads)
    monkeypatch.setattr(simulation, "busiest_row_counts", make_reader)


@pytest.mark.parametrize(("precision", "layout"), slow_but(CASES, ("bf16", "one rank"), every=CASES))
def test_ranks_with_all_experts_read_no_row_counts(precision, layout):
    assert _reads(precision, LAYOUTS[layout]) == STEP_READS


def test_ranks_with_some_experts_read_them():
    found = _reads("bf16", ("parallel=dp2ep2", "cluster.devices_per_node=2"))
    assert found == STEP_READS | {"row counts"}
