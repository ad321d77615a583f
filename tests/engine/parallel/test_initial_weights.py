"""Initial weights under layouts: those of one process, bit for bit, of which a rank draws its own part only, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import run_loop, ten_steps
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model import init_value as drawing
from megalaunch.engine.model.init_value import init_value
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train import run_start
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, with_values

SHARED = {"model__num_attention_heads": 8, "model__num_query_groups": 2, "model__head_dim": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp3": {"parallel__dp": 3, "batch__global_batch_size": 6},  # rows that three ranks share unevenly
    "tp4, more ranks than key/value heads": {"parallel__tp": 4, "model__vocab_size": 64} | SHARED,
    "tp2 dp2": {"parallel__tp": 2, "parallel__dp": 2, "model__vocab_size": 62, "model__attention_sinks": True},
    "tp4, output gates": {"parallel__tp": 4, "model__vocab_size": 64, "model__attention_output_gate": True} | SHARED,
    "tp2 latent attention": {
        "parallel__tp": 2,
        "model__vocab_size": 62,
        "model__mla": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    },
    "hsdp": {"parallel__dp": 4, "parallel__dp_replicate": 2, "batch__micro_batch_size": 1},
    "pp2 zbv, tied": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "zbv",
        "model__num_layers": 4,
        "model__tie_word_embeddings": True,
    },
}


def _differing(spec: RunSpec) -> tuple[list[str], int, int]:
    """Parameters that are not those of one process; how many numbers were drawn, and how many this rank holds."""
    own_draw, drawn = drawing.fill_normal, [0]

    def counted(out: torch.Tensor, *args: Any) -> None:
        drawn[0] += out.numel()
        own_draw(out, *args)

    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    drawing.fill_normal = counted
    model = build_sharded_model(spec, mesh)
    drawing.fill_normal = own_draw
    different, held = [], 0
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        held += to_local_no_grad(parameter).numel()
        if not torch.equal(whole, init_value(name, parameter.shape, model.config, spec.train.seed)):
            different.append(name)
    return different, drawn[0], held


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tp2 dp2", "tp2 latent attention", "pp2 zbv, tied"))
def test_every_layout_begins_alike_and_each_rank_draws_its_own_part(layout):
    spec = small_spec(**LAYOUTS[layout])
    for different, drawn, held in run_ranks(spec.cluster.devices_per_node, _differing, spec):
        assert not different
        assert 0 < drawn <= held


def test_nothing_is_drawn_before_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = ten_steps(tmp_path)
    assert "after step 2" in run_loop(with_values(spec, {"train.exit_at_step": 2}), tmp_path / "run").reason

    def refused(*args: Any) -> None:
        raise AssertionError("weights are drawn, though a checkpoint has them")

    monkeypatch.setattr(run_start, "init_weights", refused)
    monkeypatch.setattr(drawing, "fill_normal", refused)
    assert "after step 3" in run_loop(with_values(spec, {"train.exit_at_step": 3}), tmp_path / "run").reason
    beside = with_values(spec, {"train.exit_at_step": 1, "checkpoint.load_pretrained": str(tmp_path / "run")})
    assert "after step 1" in run_loop(beside, tmp_path / "beside").reason
