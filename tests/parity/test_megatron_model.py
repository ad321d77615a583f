"""The engine's loss and every gradient against megatron-core's own model with the same weights, whole and under tp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from megatron_model import loss_and_gradients, tensors_of
from oracle import SEQUENCE, RandomSamples, small_spec
from slow_cases import slow_but

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.grads import finalize_grads
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

BATCH = 8


def both(spec: RunSpec) -> dict[str, Any]:
    """Our loss and theirs, and by its name each of its gradients beside ours."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    weights = {name: _whole(parameter.detach()) for name, parameter in model.named_parameters()}
    batches = PrefetchingDataLoader(RandomSamples(), make_batch_sampler(spec, mesh), mesh.device)
    loss = make_forward_backward(spec, mesh, model).train(batches.get(1, 1), BATCH * SEQUENCE).sum().item()
    batches.close()
    finalize_grads(model, mesh, spec.parallel.sequence_parallel)
    ours = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}

    rows = np.stack([RandomSamples()[index].tokens for index in range(BATCH)])
    tokens = torch.from_numpy(rows)
    their_loss, theirs = loss_and_gradients(spec.model, weights, tokens, mesh.tp.rank, mesh.tp.size)
    mine = tensors_of(spec.model, ours, mesh.tp.rank, mesh.tp.size)
    return {"losses": (loss, their_loss), "gradients": {name: (mine[name], value) for name, value in theirs.items()}}


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


RANKS = [(1, False, False), (2, False, False), (2, True, False), (2, True, True)]


@pytest.mark.parametrize(("ranks", "sequence_parallel", "gated"), slow_but(RANKS, RANKS[0], RANKS[2], every=[RANKS[3]]))
def test_loss_and_every_gradient(ranks, sequence_parallel, gated):
    """Theirs without sequence parallelism, which its local layers lack; ours is held to it in both forms."""
    spec = small_spec(
        parallel__dp=1,
        parallel__tp=ranks,
        parallel__sequence_parallel=sequence_parallel,
        model__vocab_size=64,
        model__attention_output_gate=gated,
    )
    for answer in run_ranks(ranks, both, spec, timeout=120):
        np.testing.assert_allclose(*answer["losses"], rtol=1e-6)
        assert len(answer["gradients"]) == 3 + 6 * spec.model.num_layers
        for name, (mine, theirs) in answer["gradients"].items():
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max(), err_msg=name)
