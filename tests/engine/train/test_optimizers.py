"""Every optimizer gives the updates of one process under every kind of sharding, and goes on from a checkpoint."""

from __future__ import annotations

import pytest
from oracle import hold_to_one_process, small_spec

SGD = {"optimizer__name": "sgd", "optimizer__lr": 0.3, "optimizer__momentum": 0.9}
OPTIMIZERS = {
    "sgd": SGD,
    "nesterov": {**SGD, "optimizer__nesterov": True},
    "no momentum": {**SGD, "optimizer__momentum": 0.0},
    "lion": {"optimizer__name": "lion", "optimizer__beta2": 0.99, "optimizer__weight_decay": 1.0},
}
LAYOUTS = {
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "cp2": {"parallel__cp": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, "model__num_layers": 1, "model__moe": {"num_experts": 4, "top_k": 2}},
}
CASES = [(name, layout) for name in ("sgd", "lion") for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("nesterov", "tp2"), ("no momentum", "dp2 zero3")])
def test_updates_equal_one_process(name, layout):
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **OPTIMIZERS[name], **LAYOUTS[layout]))
