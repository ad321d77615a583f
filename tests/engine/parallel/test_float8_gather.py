"""All-gathers of weights in fp8: a step computes what it computes without them, to the bit in bf16."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from float8_runs import float8_spec
from forked_ranks import run_ranks
from oracle import joined_stages, on_ranks
from slow_cases import rotating, slow_but

RECIPES = ("tensorwise", "delayed")
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "dp2 zero1": {"dp": 2, "data_sharding": "optim"},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "data_sharding": "optim_grads_params"},
    "dp2 pp2": {"dp": 2, "pp": 2, "schedule": "1f1b", "data_sharding": "optim"},
    "dp3 zero3": {"dp": 3, "data_sharding": "optim_grads_params"},  # shards of different sizes
    "dp4 hsdp2": {"dp": 4, "dp_replicate": 2, "data_sharding": "optim_grads_params"},
    "dp4 ep2 zero3": {"dp": 4, "ep": 2, "data_sharding": "optim_grads_params"},
    "dp3 zero3 of experts": {"dp": 3, "data_sharding": "optim_grads_params"},
    "dp4 ep2 etp2": {"dp": 4, "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2, "data_sharding": "optim"},
}


def trained(layout: str, recipe: str, param_gather: bool) -> Any:
    values: dict[str, Any] = {"batch__global_batch_size": 2 * LAYOUTS[layout]["dp"], "model__num_layers": 2}
    values["precision__fp8"] = {"recipe": recipe, "param_gather": param_gather}
    if "ep2" in layout or "experts" in layout:
        values["model__moe"] = MOE
    spec = float8_spec(LAYOUTS[layout], recipe, **values)
    return joined_stages(run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True))


CROSSED = {pair for pair in rotating(RECIPES, LAYOUTS, 4) if pair[1] != "dp4 ep2 etp2"}  # half a minute alone
DAILY = [("tensorwise", "dp3 zero3 of experts"), *CROSSED]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    slow_but(
        product(RECIPES, LAYOUTS),
        ("tensorwise", "dp3 zero3 of experts"),
        every=DAILY,
    ),
)
def test_numbers_are_those_without_it(recipe, layout):
    found, expected = trained(layout, recipe, True), trained(layout, recipe, False)
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.validation == expected.validation
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    for name, parameter in expected.parameters.items():
        assert torch.equal(found.parameters[name], parameter), name
