"""Find silent corruption: compare the hashes of weights and optimizer states that several ranks hold.

A bit that flips in a device's memory changes one replica only; nothing else would notice it. Megatron-LM's counterpart
is `check_param_hashes_across_dp_replicas`.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.outer_optimizer import is_of_one_replica
from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.checkpointer import state_tensors
from megalaunch.engine.train.rank_sync import all_gather_objects
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec

_CHUNK = 1 << 24  # elements hashed at once: each takes 16 bytes meanwhile
_SHOWN = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


@dataclass(frozen=True)
class DifferingRank:
    """A rank whose replica differs from those of others; `certain` if those are the majority."""

    rank: int
    place: str
    tensors: list[str]
    certain: bool


def hash_tensor(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, an int64 scalar on its device; any single flipped bit changes it.

    With the elements v_i as integers it is sum_i v_i (2 i + 1) mod 2^64: a flip of bit k changes it by an odd multiple
    of 2^k.
    """
    values = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK].long()
        odd = torch.arange(start, start + len(part), device=tensor.device) * 2 + 1
        total += (part * odd).sum()
    return total


class WeightHashes:
    """Comparison of replicas every `train.check_weight_hash_across_dp_replicas_interval` steps and before saves.

    So every checkpoint has state whose replicas were equal. `check...` methods are collective, and raise on all ranks.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, model: ModelParts, optimizer: Optimizer) -> None:
        self._interval = spec.train.check_weight_hash_across_dp_replicas_interval
        self._mesh, self._model, self._optimizer = mesh, model, optimizer
        self._equal_step = 0

    def begin_at(self, step: int) -> None:
        """Take the replicas for equal at a step: they were loaded from one checkpoint."""
        self._equal_step = step

    def check_if_due(self, step: int) -> None:
        """Compare the replicas at every multiple of the interval. Raises RunEnd if any differ."""
        if self._interval and step % self._interval == 0:
            self._check(step)

    def check_before_save(self, step: int) -> None:
        """Compare the replicas, unless they were compared at this step. Raises RunEnd if any differ."""
        if self._interval and step != self._equal_step:
            self._check(step)

    def _check(self, step: int) -> None:
        mine = self._differing_tensors()
        found = torch.tensor([len(mine)], device=self._mesh.device)
        dist.all_reduce(found)
        if found.item():
            self._raise(step, mine)
        self._equal_step = step

    def _differing_tensors(self) -> dict[str, bool]:
        """Return the tensors whose replica on this rank is not that of others, and whether those are the majority."""
        differing: dict[str, bool] = {}
        for (grid, axis), names in self._replicated_tensors().items():
            group, size = grid.get_group(axis), grid.size(axis)
            mine = torch.stack([hash_tensor(shard) for shard in names.values()]).to(self._mesh.device)
            gathered = mine.new_empty(size * len(mine))
            dist.all_gather_into_tensor(gathered, mine, group=group)
            columns = gathered.view(size, -1).T.tolist()
            for name, own, hashes in zip(names, mine.tolist(), columns, strict=True):
                (usual, count), *others = Counter(hashes).most_common()
                tied = bool(others) and others[0][1] == count
                if others and (tied or own != usual):
                    differing[name] = not tied
        return differing

    def _replicated_tensors(self) -> dict[tuple[DeviceMesh, int], dict[str, Tensor]]:
        """Return this rank's shards of replicated tensors by mesh and replicated axis, in the same order on all."""
        found: dict[tuple[DeviceMesh, int], dict[str, Tensor]] = {}
        apart = self._optimizer.outer is not None
        world = self._mesh.world_mesh
        for name, tensor in state_tensors(self._model, self._optimizer).items():
            shard = to_local_no_grad(tensor)
            if apart and not is_of_one_replica(name) and shard.numel():  # replicas have meshes of their own
                axis = (world.mesh_dim_names or ()).index("dp_replicate")
                found.setdefault((world, axis), {})[name] = shard
            if not isinstance(tensor, DTensor):
                continue
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate() and tensor.device_mesh.size(axis) > 1 and shard.numel():
                    found.setdefault((tensor.device_mesh, axis), {})[name] = shard
        return found

    def _raise(self, step: int, mine: dict[str, bool]) -> None:
        rank = self._mesh.rank
        place = f"rank {rank} ({self._mesh.topology.coordinates(rank)}) on {socket.gethostname()}"
        answers = all_gather_objects(
            DifferingRank(rank, place, list(mine)[:_SHOWN], all(mine.values())) if mine else None
        )
        ranks = [answer for answer in answers if isinstance(answer, DifferingRank)]
        certain = [answer for answer in ranks if answer.certain]
        named = certain or ranks
        shown = ", ".join(answer.place for answer in named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")
        cause = f"{shown} {'differs' if len(named) == 1 else 'differ'} from the other replicas"
        if not certain:
            cause = f"one of {shown} is wrong: their replicas differ"
        between = f"silent corruption between steps {self._equal_step + 1} and {step}"
        reason = f"{between}: {cause}, in {', '.join(named[0].tensors)}"
        details = {
            "differing_ranks": ", ".join(str(answer.rank) for answer in named),
            "ranks": [asdict(answer) for answer in named],
            "equal_step": self._equal_step,
        }
        raise RunEnd(ExitCode.NON_FINITE, reason, step, details)
