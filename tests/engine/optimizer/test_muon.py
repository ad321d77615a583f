"""Muon's update of one matrix is torch's, and shards become whole matrices and shards again."""

from __future__ import annotations

import pytest
import torch
from forked_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.optimizer.muon import Muon, _by_axes
from megalaunch.engine.optimizer.sharded_matrix import gather_matrices, list_matrices, scatter_matrices
from megalaunch.engine.optimizer.update_rules import ParameterState, Update
from megalaunch.schema.optimizer import OptimizerSpec


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(48, 20), (20, 48)])
@pytest.mark.parametrize(
    ("adjust", "scale"), [("match_rms_adamw", ("spectral", 0.2)), ("original", ("shape_scaling", 1.0))]
)
def test_one_matrix_equals_torch(shape, adjust, scale):
    """To the bit without momentum, which torch averages: with it to the rounding of bf16."""
    for momentum, nesterov, tolerance in ((0.0, False, 0.0), (0.95, True, 0.02)):
        mine, theirs = random(*shape), torch.nn.Parameter(random(*shape))
        reference = torch.optim.Muon(
            [theirs], lr=0.01, weight_decay=0.1, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust
        )
        spec = OptimizerSpec(
            momentum=momentum, nesterov=nesterov, muon_scale_mode=scale[0], muon_extra_scale_factor=scale[1]
        )
        rule, buffer = Muon(spec, torch.bfloat16), {"momentum_buffer": torch.zeros(shape)}
        for step in range(3):
            theirs.grad = random(*shape, seed=step + 1)
            reference.step()
            state = ParameterState(buffer, torch.zeros(()))
            rule.apply(Update([mine], [4 * random(*shape, seed=step + 1)], [state], 0.01, 0.1, 4.0))
        moved = (theirs.detach() - random(*shape)).abs().max()
        assert (mine - theirs.detach()).abs().max() <= tolerance * moved


def _there_and_back() -> tuple[list[int], bool]:
    """Which matrices this rank collected whole, and whether all of its shards came back."""
    line, grid = (
        init_device_mesh("cpu", (4,), mesh_dim_names=("a",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("b", "c")),
    )
    layouts = [(line, [Shard(0)]), (line, [Shard(1)]), (grid, [Shard(0), Shard(1)]), (grid, [Shard(1), Shard(0)])]
    collected, same = [], True
    for mesh, placements in layouts:
        wholes = [random(*shape, seed=seed) for seed, shape in enumerate([(5, 3), (2, 9), (6, 6)])]
        tensors = [distribute_tensor(whole, mesh, placements) for whole in wholes]
        matrices = [matrix for tensor in tensors for matrix in list_matrices(tensor, tensor)]
        mine = gather_matrices(matrices, torch.float64)
        owned = [index for one in mine for index, whole in enumerate(wholes) if torch.equal(one.float(), whole)]
        assert len(owned) == len(mine)
        collected += owned
        back = scatter_matrices(mine, matrices, torch.float64)
        same &= all(torch.equal(b.float(), to_local_no_grad(t)) for b, t in zip(back, tensors, strict=True))
    return collected, same


def test_shards_become_whole_matrices_and_shards_again():
    """Of four ranks some have fewer rows or none; three matrices are dealt out, in each of four layouts."""
    found = run_ranks(4, _there_and_back)
    assert all(same for _, same in found)
    assert sorted(index for collected, _ in found for index in collected) == [0] * 4 + [1] * 4 + [2] * 4


def test_matrices_that_ranks_take_together_have_the_same_size():
    shapes = [(8, 8), (2, 8), (8, 32), (32, 8), (2, 8), (8, 8)]
    tensors = [random(*shape) for shape in shapes]
    update = Update(tensors, tensors, [ParameterState({}, torch.zeros(())) for _ in tensors], 0.01, 0.1, 1.0)
    (matrices,) = _by_axes(update)
    assert [sorted(matrix.shape) for matrix in matrices] == [[8, 32]] * 2 + [[8, 8]] * 2 + [[2, 8]] * 2
