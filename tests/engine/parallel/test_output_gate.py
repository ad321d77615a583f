"""Gated attention under layouts that shard, exchange or recompute what it gates, against one process.

`test_block_features.py` has the plain layouts.
"""

from __future__ import annotations

from typing import Any

import pytest
from oracle import few_samples, hold_to_one_process, shake, small_spec
from slow_cases import slow_but

GATED: dict[str, Any] = {
    "model__attention_output_gate": True,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "model__vocab_size": 64,
    "model__init_std": 0.2,
}
PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True, "model__sliding_window": 5}
ATTENTION = {"recompute__granularity": "selective", "recompute__modules": ["attention"]}
SP = {"parallel__tp": 2, "parallel__sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp, attention recomputed": SP | ATTENTION,
    "tp2 sp, overlapped": SP | {"parallel__tp_comm_overlap": True},
    "tp2, norms over all heads": SP | {"model__qk_norm": "full", "recompute__granularity": "full"},
    "tp4, one group": SP | {"parallel__tp": 4, "model__num_query_groups": 1, "model__qkv_bias": True},
    "dp2 zero3, experts": {
        "parallel__dp": 2,
        "parallel__ep": 2,
        "parallel__data_sharding": "optim_grads_params",
        "model__moe": {"num_experts": 4, "top_k": 2},
    },
    "pp2 zero bubble, attention recomputed": {
        "parallel__pp": 2,
        "parallel__schedule": "zero_bubble",
        "model__num_layers": 4,
        **ATTENTION,
    },
    "pp2 zbv, a depth of mtp": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zbv",
        "model__num_layers": 4,
        "model__mtp": {"num_layers": 1},
    },
    "cp2 ring, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "p2p", **PACKED},
    "cp2 allgather, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "allgather", **PACKED, **ATTENTION},
    "cp2 a2a, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "a2a", **PACKED},
    "cp4 a2a and ring": {
        "parallel__cp": 4,
        "parallel__cp_comm_type": "a2a+p2p",
        "parallel__hierarchical_context_parallel_sizes": [2, 2],
    },
    "tp2 cp2 dynamic": {"parallel__cp": 2, "parallel__dynamic_context_parallel": True, **PACKED, **SP},
    "compiled": {"parallel__dp": 2, "train__compile": True, **ATTENTION},
    "activations offloaded": {"recompute__cpu_offloading_num_layers": 1},
}
QUICK = ["tp2 sp, attention recomputed", "tp2 cp2 dynamic"]
DAILY = ["pp2 zero bubble, attention recomputed", "dp2 zero3, experts", "tp4, one group"]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, *QUICK, every=DAILY))
def test_the_steps_are_those_of_one_process(layout, monkeypatch):
    monkeypatch.setattr("megalaunch.engine.parallel.compile.BACKEND", "aot_eager")  # the default takes minutes
    values = {"parallel__dp": 1, **GATED, **LAYOUTS[layout]}
    hold_to_one_process(small_spec(**few_samples(values)), prepare=shake)
