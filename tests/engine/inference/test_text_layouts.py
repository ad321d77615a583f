"""Text from a model that lies over ranks is that of one process, token for token, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.engine.inference.generate import GenerationConfig, TextModel, generate_tokens
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.parallel.pipeline_forward import DistributedGenerator
from megalaunch.engine.train.forward_backward import make_pipeline_forward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PROMPTS = [[0, 3, 6, 9, 12], [15, 18]]  # of different lengths, and none that ranks could share
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "pp2 there and back": {"pp": 2, "vpp": 2, "schedule": "zbv"},
    "dp2 divided": {"dp": 2, "data_sharding": "optim_grads_params"},
}


def tokens_by(model: TextModel) -> list[list[int]]:
    """Step by step, of both rows."""
    return [
        drawn.tokens_B.tolist() for drawn in generate_tokens(model, PROMPTS, GenerationConfig(12, Sampling(seed=5)))
    ]


def written(spec: RunSpec) -> list[list[int]]:
    """What this rank's model writes."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    text_model = DistributedGenerator(model, mesh, make_pipeline_forward(spec, mesh, model))
    return tokens_by(text_model)


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "tp2", "cp2", "pp2 there and back"))
def test_text_of_a_layout(name):
    values = {f"parallel__{key}": value for key, value in LAYOUTS[name].items()}
    spec = small_spec(**{"parallel__dp": 1, "model__vocab_size": 64, "model__num_layers": 4, **values})
    alone = build_decoder(spec.model)
    init_weights(alone, spec.train.seed)
    expected = tokens_by(alone)
    assert run_ranks(2, written, spec) == [expected, expected]
    assert len({token for row in expected for token in row}) > 4
