"""An awkward decoder under the layouts that are used most, each crossed with accumulation and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import hold_to_one_process, shake, small_spec
from slow_cases import slow_but

# Tied embeddings, biases, normed queries and keys, packed documents of which a rank may see none that counts, a
# vocabulary that is no power of two, and weights large enough for softmaxes to bend.
AWKWARD: dict[str, Any] = {
    "model__num_layers": 5,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "model__vocab_size": 62,
    "model__tie_word_embeddings": True,
    "model__init_std": 0.2,
    "model__qk_norm": "head",
    "model__qkv_bias": True,
    "model__attention_output_bias": True,
    "model__mlp_bias": True,
    "data__reset_attention_mask": True,
}
STAGES: dict[str, Any] = {
    "parallel__pp": 2,
    "parallel__num_layers_in_first_pipeline_stage": 2,
    "parallel__schedule": "1f1b",
}
SPLIT: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__dp": 2},
    "tp2 sp": SPLIT,
    "pp2": STAGES,
    "cp2": {"parallel__cp": 2},
    "dp2tp2pp2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params", **SPLIT, **STAGES},
}
FOUR_STAGES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "zero_bubble": {},
    "interleaved": {"parallel__vpp": 2},
    "zbv": {"parallel__vpp": 2},
    "dualpipev": {"parallel__vpp": 2},
}
BATCH = 8


def _held_to_one_process(**values: Any) -> None:
    hold_to_one_process(small_spec(**{**AWKWARD, "parallel__dp": 1, **values}), prepare=shake)


CROSSED = [("least", "none"), ("4", "full"), ("least", "full"), ("4", "none")]


PAIRS = [(layout, *crossed) for layout in LAYOUTS for crossed in CROSSED]
ACCUMULATED = [(layout, "4", "full") for layout in ("pp2", "cp2")]
DAILY = [*ACCUMULATED, ("dp2tp2pp2", "least", "none")]


@pytest.mark.parametrize(("layout", "accumulated", "recomputed"), slow_but(PAIRS, ("pp2", "4", "full"), every=DAILY))
def test_accumulation_and_recomputation(layout, accumulated, recomputed):
    values = LAYOUTS[layout]
    least = values.get("parallel__pp", 1)  # every stage has a microbatch to work on
    microbatches = least if accumulated == "least" else int(accumulated)
    _held_to_one_process(
        **values,
        batch__global_batch_size=BATCH,
        batch__micro_batch_size=BATCH // values.get("parallel__dp", 1) // microbatches,
        recompute__granularity=recomputed,
    )


@pytest.mark.parametrize("schedule", slow_but(FOUR_STAGES, every=["dualpipev"]))
def test_four_stages(schedule):
    _held_to_one_process(
        parallel__pp=4,
        parallel__schedule=schedule,
        model__num_layers=8,
        batch__micro_batch_size=1,
        **FOUR_STAGES[schedule],
    )


@pytest.mark.parametrize("exchange", slow_but(["p2p", "allgather", "a2a"], every=()))
def test_context_beside_data_and_tensor_parallelism(exchange):
    _held_to_one_process(parallel__dp=2, parallel__cp=2, parallel__cp_comm_type=exchange, **SPLIT)
