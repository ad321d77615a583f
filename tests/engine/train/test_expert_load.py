"""Expert biases after a step: moved by the load of the whole step, against it."""

import pytest
import torch
from oracle import small_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.train.expert_load import moe_layers, take_expert_sums, update_expert_biases

MOE = {"num_experts": 4, "top_k": 2, "first_k_dense_replace": 1, "score": "sigmoid", "balance_bias": True}


def test_biases_move_against_the_load():
    spec = small_spec(model__moe=MOE | {"balance_bias_rate": 0.1})
    model = ModelParts(build_decoder(spec.model))
    sums_LE = torch.tensor([[9.0, 1, 5, 5, 0, 0], [0, 0, 0, 20, 0, 0]], dtype=torch.float64)
    update_expert_biases(model, sums_LE, spec.model.moe)
    biases = [layer.router.expert_bias.tolist() for layer in moe_layers(model).values()]
    assert biases[0] == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    assert biases[1] == pytest.approx([0.1, 0.1, 0.1, -0.1])


def test_a_step_without_microbatches_has_no_load():
    model = ModelParts(build_decoder(small_spec(model__moe=MOE).model))
    assert take_expert_sums(model, torch.device("cpu")).tolist() == [[0.0] * 6] * 2
    assert take_expert_sums(ModelParts(build_decoder(small_spec().model)), torch.device("cpu")) is None
