"""Multi-token prediction under every kind of layout against plain torch: gradients, norm, three steps, validation."""

from __future__ import annotations

from typing import Any

import pytest
from forked_ranks import run_ranks
from oracle import assert_same, few_samples, hold_to_one_process, joined_stages, on_ranks, shake, small_spec
from slow_cases import slow_but

PACKED: dict[str, Any] = {"data__reset_attention_mask": True}
TWO_STAGES: dict[str, Any] = {"parallel__pp": 2, "model__num_layers": 4, "batch__micro_batch_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, packed, in chunks": {**PACKED, "train__loss_chunks": 3},
    "one process, recomputed": {"recompute__granularity": "full"},
    "dp2 zero3, packed": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params", **PACKED},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "tp2 sp, tied, norms recomputed": {
        "parallel__tp": 2,
        "parallel__sequence_parallel": True,
        "model__tie_word_embeddings": True,
        "recompute__granularity": "selective",
        "recompute__modules": ["attention", "norm", "activation"],
    },
    "cp2, packed": {"parallel__cp": 2, **PACKED},
    "pp2 1f1b": {"parallel__schedule": "1f1b", **TWO_STAGES},
    "pp2 interleaved, tied": {
        "parallel__schedule": "interleaved",
        "parallel__vpp": 2,
        "model__tie_word_embeddings": True,
        **TWO_STAGES,
    },
    "pp2 zero_bubble": {"parallel__schedule": "zero_bubble", "parallel__vpp": 2, **TWO_STAGES},
    "pp2 zbv, in chunks": {"parallel__schedule": "zbv", "parallel__vpp": 2, "train__loss_chunks": 3, **TWO_STAGES},
    "pp3, depths before the head's stage, tied": {
        **TWO_STAGES,
        "parallel__pp": 3,
        "parallel__schedule": "1f1b",
        "parallel__pipeline_layout": "Ett|ttmm|L",
        "model__tie_word_embeddings": True,
    },
}
BASE: dict[str, Any] = {
    "model__mtp": {"num_layers": 2, "loss_coeff": 0.7},
    "model__vocab_size": 64,
    "model__num_layers": 2,
    "parallel__dp": 1,
}
QUICK = ("one process, packed, in chunks", "pp2 zero_bubble")
SLOW = ("one process", "tp2 sp", "cp2, packed", "pp2 1f1b")


@pytest.mark.parametrize("name", slow_but(LAYOUTS, *QUICK, slow=SLOW, one_in=2))
def test_layouts_have_the_numbers_of_plain_torch(name):
    hold_to_one_process(small_spec(**few_samples(BASE | LAYOUTS[name])), prepare=shake)


DEEPSEEK = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 16,
    "first_k_dense_replace": 1,
    "score": "sigmoid",
    "balance_bias": True,
    "balance_bias_rate": 0.05,
    "balance_loss": "sequence",
    "balance_loss_coeff": 0.5,
}


def test_a_depth_has_experts_whose_load_is_balanced():
    """The balance loss counts the positions of a depth whose label is past the end: one rank is the reference."""
    model = BASE | {"model__moe": DEEPSEEK, "batch__micro_batch_size": 1, "parallel__schedule": "1f1b"}
    alone = run_ranks(1, on_ranks, small_spec(**model))
    split = run_ranks(2, on_ranks, small_spec(**model, parallel__pp=2), True)
    assert_same(joined_stages(split), joined_stages(alone))
    assert "mtp.1.layer.mlp.experts.up_proj.weight" in alone[0].gradients


@pytest.mark.slow
def test_experts_of_a_depth_are_sharded():
    plain = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
    hold_to_one_process(small_spec(**BASE | {"model__moe": plain, "parallel__dp": 2, "parallel__ep": 2}))
