"""Expert biases after a step: moved by the load of the whole step, against it."""

import pytest
import torch
from oracle import small_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.train.expert_load import moe_layers, router_states, take_expert_sums, update_routers

MOE = {"num_experts": 4, "top_k": 2, "first_k_dense_replace": 1, "score": "sigmoid", "balance_bias": True}


def test_biases_move_against_the_load():
    spec = small_spec(model__moe=MOE | {"balance_bias_rate": 0.1})
    model = ModelParts(build_decoder(spec.model))
    sums_LE = torch.tensor([[9.0, 1, 5, 5], [0, 0, 0, 20]], dtype=torch.float64)
    sums_LE = torch.cat((sums_LE, torch.full((2, 8), 5.0)), dim=1)  # those of the best scores do not count
    update_routers(model, sums_LE, spec.model.moe)
    biases = [layer.router.expert_bias.tolist() for layer in moe_layers(model).values()]
    assert biases[0] == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert biases[1] == pytest.approx([0.1, 0.1, 0.1, -0.1])


def test_the_load_of_the_step_before_is_that_of_the_best_scores():
    spec = small_spec(model__moe=MOE | {"balance_loss": "global", "balance_loss_coeff": 0.1})
    model = ModelParts(build_decoder(spec.model))
    sums_LE = torch.tensor([[5.0, 5, 5, 5, 8, 4, 4, 4, 0, 0, 0, 0]] * 2, dtype=torch.float64)
    update_routers(model, sums_LE, spec.model.moe)
    states = router_states(model)
    assert list(states) == ["router.layers.1.previous_load", "router.layers.2.previous_load"]
    assert [load_E.tolist() for load_E in states.values()] == [pytest.approx([0.4, 0.2, 0.2, 0.2])] * 2


def test_a_step_without_microbatches_has_no_load():
    model = ModelParts(build_decoder(small_spec(model__moe=MOE).model))
    assert take_expert_sums(model, torch.device("cpu")).tolist() == [[0.0] * 12] * 2
    assert take_expert_sums(ModelParts(build_decoder(small_spec().model)), torch.device("cpu")) is None
