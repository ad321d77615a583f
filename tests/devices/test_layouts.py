"""The engine on a device that is no CPU and no GPU: every layout's gradients and updates equal those of one CPU."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import hold_to_one_process, shake, small_spec
from slow_cases import slow_but

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "tp2 sp overlapped": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 4},
    "pp2 zbv": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zbv", "model__num_layers": 4},
    "zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "hsdp": {"parallel__dp": 4, "parallel__dp_replicate": 2},
    **{f"cp2 {way}": {"parallel__cp": 2, "parallel__cp_comm_type": way} for way in ("p2p", "allgather", "a2a")},
    "tp2pp2dp2": {f"parallel__{axis}": 2 for axis in ("tp", "pp", "dp")}
    | {"parallel__schedule": "1f1b", "model__num_layers": 4},
    "recomputed": {"recompute__granularity": "full", "model__hidden_dropout": 0.1, "model__attention_dropout": 0.1},
    "offloaded": {"recompute__cpu_offloading_num_layers": 2},
    "packed": {"data__reset_attention_mask": True, "data__reset_position_ids": True, "data__eod_mask_loss": True},
    "loss in chunks": {"train__loss_chunks": 4},
}


@pytest.mark.parametrize(
    "layout", slow_but(LAYOUTS, every=["tp2 sp", "tp2pp2dp2", "zero3", "cp2 p2p", "recomputed", "packed"])
)
def test_the_layout_equals_one_cpu(in_fresh_process, layout):
    spec = small_spec(platform__chip="txda", **LAYOUTS[layout])
    in_fresh_process(hold_to_one_process, spec, shake)
