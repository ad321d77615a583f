"""The time of Muon: its matrices are those of the engine, its iterations those of published runs."""

from __future__ import annotations

from collections import Counter

import pytest
from made_specs import resolved
from oracle import small_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.optimizer.optimizer import _is_hidden_matrix
from megalaunch.plan.cost import step_time
from megalaunch.plan.hidden_matrices import hidden_matrices
from megalaunch.plan.layers import list_layers
from megalaunch.schema import with_values

MLA = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 16,
    "shared_ffn_hidden_size": 20,
    "first_k_dense_replace": 1,
}
MODELS = {
    "gated": {},
    "gated attention": {"model__attention_output_gate": True},
    "plain, with biases": {"model__activation": "gelu", "model__mlp_bias": True, "model__qkv_bias": True},
    "experts and a depth of mtp": {"model__moe": EXPERTS, "model__mtp": {"num_layers": 1}},
    "latent attention": {"model__mla": MLA, "model__num_query_groups": None, "model__head_dim": None},
    "latent attention without a latent of queries": {
        "model__mla": MLA | {"q_lora_rank": None},
        "model__num_query_groups": None,
        "model__head_dim": None,
    },
}


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_the_matrices_are_those_of_the_engine(values):
    model = small_spec(**values).model
    engine: Counter[tuple[int, int]] = Counter()
    for name, parameter in build_decoder(model).named_parameters():
        if _is_hidden_matrix(name, parameter):
            engine[tuple(parameter.shape[-2:])] += parameter.shape[0] if parameter.ndim == 3 else 1
    planned: Counter[tuple[int, int]] = Counter()
    for layer in list_layers(model):
        for matrix in hidden_matrices(model, layer):
            planned[matrix.rows, matrix.columns] += matrix.count
    assert planned == engine


def flops(short: int, long: int) -> int:
    """Return those of 5 iterations: each multiplies short x short by long twice, and short x short once."""
    return 5 * 2 * short * short * (2 * long + short)


def muon_extra(*overrides: str) -> float:
    """Return the seconds that a step of 8 H100 takes beyond that of AdamW."""
    spec = resolved(*overrides, "optimizer=muon", "platform=h100")[0]
    return step_time(spec).optimizer - step_time(with_values(spec, {"optimizer.name": "adamw"})).optimizer


ATTENTION = 2 * flops(4096, 4096) + 2 * flops(1024, 4096)
BLOCK = 3 * flops(4096, 14336)


@pytest.mark.parametrize(
    ("overrides", "layer"),
    [
        (("recipe=llama3_8b", "parallel=dp8zero1", "parallel.cp=1"), (BLOCK + ATTENTION) / 8),
        (("recipe=llama3_8b", "parallel=dp8zero0", "parallel.cp=1"), BLOCK + ATTENTION),
        (
            ("recipe=mixtral_8x7b", "parallel=ep8zero1", "cluster.nodes=1", "cluster.devices_per_node=8"),
            BLOCK + ATTENTION / 8,
        ),  # an expert a rank
    ],
    ids=["sharded", "replicated", "experts"],
)
def test_iterations_are_shared_by_the_ranks_that_shard(overrides, layer):
    at_peak = 32 * layer / 989e12
    assert at_peak / 0.8 < muon_extra(*overrides) < at_peak / 0.5  # efficiency of matmuls, and two all-to-alls
