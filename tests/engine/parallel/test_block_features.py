"""Every part that some family adds to the plain decoder, under every layout against one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from oracle import few_samples, hold_to_one_process, shake, small_spec
from slow_cases import rotating, slow_but

# Each joins parts that some family has together, and more of them than any has.
FEATURES: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "layernorm",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "activation": "gelu_tanh",
        "position_embedding": "learned",
        "max_position_embeddings": 16,
    },
    "pythia": {
        "norm": "layernorm",
        "parallel_residual": True,
        "qkv_bias": True,
        "mlp_bias": True,
        "activation": "gelu",
        "rope": {"fraction": 0.5},
    },
    "qwen3": {"qk_norm": "head", "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 3},
    "qwen3 layernorm": {"qk_norm": "head", "head_dim": 8, "norm": "layernorm", "no_rope_layer_interval": 2},
    "olmo2": {"qk_norm": "full", "norm_placement": "post", "sliding_window": 3},
    "olmo2 layernorm": {"qk_norm": "full", "norm": "layernorm", "norm_placement": "both"},
    "gemma": {
        "norm_placement": "both",
        "norm_plus_one": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "scale_embeddings": True,
        "query_pre_attn_scalar": 9.0,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "activation": "geglu_tanh",
        "qk_norm": "head",
        "rope": {"theta": 1000.0, "window_theta": 100.0, "scaling": "linear", "factor": 4.0},
    },
    "gpt_oss": {
        "attention_sinks": True,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "qkv_bias": True,
        "attention_output_bias": True,
        "activation": "quick_geglu",
        "swiglu_limit": 1.0,
        "mlp_bias": True,
        "rope": {"scaling": "yarn", "factor": 4.0, "original_positions": 8, "truncate": False},
    },
    "gated attention": {  # of Qwen3-Next
        "attention_output_gate": True,
        "qk_norm": "head",
        "norm_plus_one": True,
        "qkv_bias": True,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope": {"fraction": 0.5},
    },
    "capped sinks": {"attention_sinks": True, "attn_logit_softcapping": 1.5},
    "llama3": {"rope": {"scaling": "llama3", "factor": 8.0, "original_positions": 8}},
    "deepseek": {
        "mla": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
        "num_query_groups": 8,
        "head_dim": 10,
        "attention_output_bias": True,
        "rope": {"scaling": "yarn", "factor": 4.0, "original_positions": 8, "mscale_all_dim": 1.0},
    },
    "deepseek lite": {
        "mla": {"kv_lora_rank": 10, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 9},
        "num_query_groups": 8,
        "head_dim": 7,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp zero3": {"tp": 2, "sequence_parallel": True, "data_sharding": "optim_grads_params"},
    "tp4 sp": {"tp": 4, "sequence_parallel": True},  # more ranks than key/value heads
    "pp3": {"pp": 3, "schedule": "1f1b"},
    "cp2 ring": {"cp": 2, "cp_comm_type": "p2p"},
    "cp2 allgather": {"cp": 2, "cp_comm_type": "allgather"},
    "cp2 a2a": {"cp": 2, "cp_comm_type": "a2a"},
}


AWKWARD = {  # larger weights than usual: caps, clamps and softmaxes that hardly bend would hide a fault
    "model__vocab_size": 64,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "model__init_std": 0.2,
    "parallel__dp": 1,
}


def _hold_to_one_process(features: dict[str, Any], layout: dict[str, Any], **values: Any) -> None:
    values |= {f"model__{key}": value for key, value in features.items()}
    values |= {f"parallel__{key}": value for key, value in layout.items()}
    hold_to_one_process(small_spec(**few_samples({**AWKWARD, **values})), prepare=shake)


# Quick: two families under sharded weights, and two of most parts under a pipeline and a ring. Daily: all so sharded.
QUICK = [("gpt", "tp2 sp zero3"), ("qwen3", "tp2 sp zero3"), ("gemma", "pp3"), ("gpt_oss", "cp2 ring")]

DAILY = {*QUICK, *product(FEATURES, ["tp2 sp zero3"]), *rotating(FEATURES, LAYOUTS, len(FEATURES))}


@pytest.mark.parametrize(("name", "layout"), slow_but(product(FEATURES, LAYOUTS), *QUICK, every=DAILY))
def test_every_gradient_is_that_of_one_process(name, layout):
    _hold_to_one_process(FEATURES[name], LAYOUTS[layout])


@pytest.mark.parametrize("name", slow_but(["gpt_oss", "olmo2", "gemma"], every=["gpt_oss"]))
def test_with_recomputation(name):
    layout = {"tp": 2, "cp": 2, "sequence_parallel": True}
    modules = ["attention", "norm", "activation"]
    _hold_to_one_process(FEATURES[name], layout, recompute__granularity="selective", recompute__modules=modules)
