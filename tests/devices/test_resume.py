"""A run on a device that is no CPU stops, goes on from its checkpoint, and is the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from looped_run import metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3, saved beside training": {"parallel.data_sharding": "optim_grads_params", "checkpoint.async_save": True},
    "tp2pp2, saved between steps": {
        "cluster.devices_per_node": 4,
        "parallel.dp": 1,
        "parallel.tp": 2,
        "parallel.pp": 2,
        "parallel.schedule": "1f1b",
        "model.num_layers": 4,
    },
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, every=["zero3, saved beside training"]))
def test_stop_and_resume_is_exact(in_fresh_process, tmp_path, layout):
    (tmp_path / "tokens").mkdir()
    values = {"platform.chip": "txda", "train.steps": STEPS, "model.hidden_dropout": 0.2, **LAYOUTS[layout]}
    spec = with_values(ten_steps(tmp_path / "tokens"), values)
    assert in_fresh_process(_reason, spec, tmp_path / "whole") == f"finished all {STEPS} steps"
    stopped = in_fresh_process(_reason, with_values(spec, {"train.exit_at_step": 3}), tmp_path / "parts")
    assert f"after step 3 of {STEPS} as asked" in stopped
    assert in_fresh_process(_reason, spec, tmp_path / "parts") == f"finished all {STEPS} steps"
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    first, second = (_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert {name.split(".")[0] for name in first} == {"model", "optimizer"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def _reason(spec: RunSpec, root: Path) -> str:
    return run_loop(spec, root, timeout=120).reason


def _tensors(root: Path) -> dict[str, torch.Tensor]:
    return read_tensors(RunDirectory(root).checkpoint(STEPS))
