"""The memory model against steps of our engine where layers of several kinds follow one another in several orders.

It takes the layer that needs most with all stored activations, though those of the layers after it are freed by then:
exact if such a layer is the last one, else too much, never too little. No recipe has its peak there.
"""

from __future__ import annotations

import pytest
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.engine.simulate.deep_plan import deep_plan
from megalaunch.plan.memory import predict_memory

SIZES = (
    *("model.hidden_size=1024", "model.ffn_hidden_size=3584", "model.num_attention_heads=16", "model.head_dim=64"),
    *("model.num_query_groups=4", "model.vocab_size=1024", "train.steps=10", "cluster.nodes=1"),
    *("batch.micro_batch_size=2", "batch.global_batch_size=4"),
)
SCORES = ("model=llama3_8b", "model.sliding_window=512", "model.attention_backend=math", "batch.sequence_length=4096")
EXPERTS = ("model=mixtral_8x7b", "batch.sequence_length=2048", "model.num_layers=3")
GPU = ("platform=h100", "precision=bf16", "cluster.devices_per_node=1", "parallel=dp")


def _every(layers: int, interval: int) -> tuple[str, ...]:
    """Of so many layers the last of each interval has no window, and larger blocks of scores."""
    return *SCORES, *SIZES, f"model.num_layers={layers}", f"model.sliding_window_pattern={interval}"


CASES = {
    "full last": (*_every(3, 3), *GPU),
    "alternating, full last": (*_every(4, 2), *GPU),
    "dense first": (*EXPERTS, *SIZES, "model.moe.first_k_dense_replace=1", *GPU),
    "full amid": (*_every(3, 2), *GPU),
    "full amid, one microbatch": (*_every(3, 2), *GPU, "batch.global_batch_size=2"),
}


@pytest.mark.parametrize("case", slow_but(CASES, "full amid"))
def test_the_plan_is_never_below_the_peak_and_close_if_the_largest_layer_is_last(case):
    spec, _ = resolved(*CASES[case])
    planned, found = predict_memory(spec), deep_plan(spec, 0)
    table = f"\nmeasured in {found.phase}: {found.kinds}\nplanned in {planned.phase}: {planned.kinds}"
    assert 1 <= planned.total / found.total < (1.18 if case.startswith("full amid") else 1.05), table
