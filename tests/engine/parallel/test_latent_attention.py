"""Latent attention with all that acts on a layer, under crossed layouts, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import few_samples, hold_to_one_process, shake, small_spec
from slow_cases import slow_but

SPLIT: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence_parallel": True}
STAGES: dict[str, Any] = {"parallel__pp": 2, "parallel__schedule": "zero_bubble"}
PACKED: dict[str, Any] = {"data__reset_attention_mask": True}
DROPPING: dict[str, Any] = {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2}
SELECTIVE: dict[str, Any] = {"recompute__granularity": "selective"}
CASES: dict[str, dict[str, Any]] = {
    "tp2 pp2 dp2": {"parallel__dp": 2, **SPLIT, **STAGES},
    "tp2 pp2 dp2 zero3, packed, all recomputed": {
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
        "recompute__granularity": "full",
        **SPLIT,
        **STAGES,
        **PACKED,
    },
    "zbv": {**STAGES, "parallel__schedule": "zbv", "parallel__vpp": 2},
    "tp2 rings": {**SPLIT, "parallel__tp_comm_overlap": True},
    "cp2 ring, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "p2p", **PACKED},
    "cp2 ring, dropping": {"parallel__cp": 2, "parallel__cp_comm_type": "p2p", **DROPPING},
    "cp2 allgather, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "allgather", **PACKED},
    "cp2 a2a, packed": {"parallel__cp": 2, "parallel__cp_comm_type": "a2a", **PACKED},
    "cp2 dynamic": {"parallel__cp": 2, "parallel__dynamic_context_parallel": True, **PACKED},
    "cp4 dynamic": {"parallel__cp": 4, "parallel__dynamic_context_parallel": True, **PACKED},
    "tp2 cp2 dynamic, recomputed": {
        "parallel__cp": 2,
        "parallel__dynamic_context_parallel": True,
        **SPLIT,
        **PACKED,
        **SELECTIVE,
        "recompute__modules": ["mla_up", "attention"],
    },
    "tp2 cp2": {"parallel__cp": 2, **SPLIT},
    "tp2 dropping": {**SPLIT, **DROPPING},
    "tp2 recomputed": {**SPLIT, **SELECTIVE, "recompute__modules": ["attention", "norm", "activation"]},
    "tp2 up projections recomputed": {**SPLIT, **SELECTIVE, "recompute__modules": ["mla_up", "norm", "attention"]},
    "up projections recomputed, zero bubble": {**STAGES, **SELECTIVE, "recompute__modules": ["mla_up"]},
    "cp2 ring, up projections recomputed": {
        "parallel__cp": 2,
        "parallel__cp_comm_type": "p2p",
        **SELECTIVE,
        "recompute__modules": ["mla_up", "norm"],
    },
    "offloaded": {"parallel__tp": 2, "recompute__cpu_offloading_num_layers": 2},
}


def _spec(**values: Any) -> Any:
    shape = {
        "model__mla": {
            "kv_lora_rank": 10,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        },
        "model__num_layers": 4,
        "model__num_attention_heads": 4,
        "model__num_query_groups": 4,
        "model__head_dim": 10,
        "model__vocab_size": 64,
        "model__init_std": 0.2,
        "parallel__dp": 1,
        "batch__micro_batch_size": 1,
    }
    return small_spec(**few_samples({**shape, **values}))


DAILY = ("zbv", "cp2 ring, packed", "cp2 a2a, packed", "cp2 dynamic", "tp2 dropping", "tp2 rings", "offloaded")


@pytest.mark.parametrize("name", slow_but(CASES, "tp2 up projections recomputed", every=DAILY))
def test_every_gradient_is_that_of_one_process(name):
    hold_to_one_process(_spec(**CASES[name]), prepare=shake)
