"""The sizes of checkpoints: of one in the run directory, of a node's part of it, and in the host memory of a node."""

from __future__ import annotations

from pathlib import Path

from megalaunch.plan.memory.model_states import root_states_per_parameter, states_per_parameter
from megalaunch.plan.memory.param_bytes import main_param_bytes
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.world import data_parallel_size, replicas_and_shards, world_size
from megalaunch.schema import RunSpec
from megalaunch.schema.local_checkpoint import LocalCheckpointSpec, MemoryCheckpointSpec


def checkpoint_bytes(spec: RunSpec) -> int | None:
    """Return the bytes of main parameters and moments; None while the model is open."""
    if None in (spec.model.head_dim, spec.model.num_query_groups, spec.model.vocab_size):
        return None
    moment = 2 if spec.precision.exp_avg_dtype == "bf16" else 4
    count = count_parameters(spec.model)
    root, states = count.embedding + count.positions + count.head, states_per_parameter(spec.optimizer)
    values = states * (count.total - root) + root_states_per_parameter(spec.optimizer) * root
    return count.total * main_param_bytes(spec) + values * moment


def node_checkpoint_bytes(spec: RunSpec) -> int | None:
    """Return the bytes of the shards of a node's ranks, of which replicas have what they hold; None while open."""
    size, dp = checkpoint_bytes(spec), data_parallel_size(world_size(spec.cluster), spec.parallel)
    if size is None or dp is None:
        return None
    replicas, _ = replicas_and_shards(dp, spec.parallel)
    return size * replicas // int(spec.cluster.nodes)


def held_bytes(folder: Path, run: str) -> int:
    """Return the bytes of the shards that newer ones replace, in the folders of a run on this node; 0 if unreadable.

    Args:
        folder: the folder of a tier.
        run: name of the run's folder in it, or a glob of it.
    """
    try:
        return sum(file.stat().st_size for file in folder.glob(f"{run}/rank_*/step_*/*"))
    except (OSError, ValueError):  # not readable; no path at all
        return 0


def node_parts_at_once(spec: RunSpec, settings: LocalCheckpointSpec | MemoryCheckpointSpec) -> int:
    """Return how many times a node's part is there at most in a tier, with copies of another node's; 0 if unused.

    A new one is written before an old one is removed, and one in memory is retained until it is on the disk too.
    """
    if not settings.interval:
        return 0
    copies = 2 if settings.replicate and int(spec.cluster.nodes) > 1 else 1
    is_drained = isinstance(settings, MemoryCheckpointSpec) and spec.checkpoint.local.interval > 0
    return copies * (settings.keep + 1 + is_drained)


def host_checkpoint_bytes(spec: RunSpec) -> int:
    """Return the bytes that checkpoints take of a node's host memory at most; 0 while the spec is open.

    They are those of the memory tier, and the copies that background threads write: of the memory tier, and of
    asynchronous saves or of a disk tier without one in memory.
    """
    size, checkpoint = node_checkpoint_bytes(spec), spec.checkpoint
    if size is None:
        return 0
    in_memory, on_disk = checkpoint.memory.interval > 0, checkpoint.local.interval > 0
    is_async = checkpoint.async_save and checkpoint.interval > 0
    staged = in_memory + (is_async or (on_disk and not in_memory))
    return size * (node_parts_at_once(spec, checkpoint.memory) + staged)
