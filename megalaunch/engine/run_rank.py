"""The life of one rank of a job: join the process group, run its entrypoint, write the outcome, leave the group.

Training and distributed inference have the same life; `worker.py` is the process around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.precision.backend_flags import set_backend_flags
from megalaunch.engine.process_group import destroy_process_group, init_process_group
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.rank_sync import all_gather_objects, raise_on_all_ranks
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.storage_retry import STORAGE, retry_while_storage_fails
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.plan.topology import Topology
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec

RankEntrypoint = Callable[[RunSpec, Mesh, RunDirectory, RunLogger, StopSignal], RunEnd]
"""The work of a job on one rank, between joining and leaving. It returns or raises a RunEnd, the same on every rank."""


def run_rank(
    spec: RunSpec,
    directory: RunDirectory,
    rank: int,
    progress: ProgressWriter,
    stop: StopSignal,
    entrypoint: RankEntrypoint,
    fence: Fence,
) -> None:
    """Run an entrypoint on one rank; return when all ranks have come to the same controlled end. Collective.

    Args:
        spec: The run spec.
        directory: The run directory, which gets the outcome.
        rank: Global rank of this worker.
        progress: Writer of this rank's progress file.
        stop: The stop signal that this worker received, if any.
        entrypoint: The work.
        fence: The right of this attempt to change the run directory, which rank 0 claims.

    Raises:
        Superseded: Later workers have claimed that right.
    """
    record = RunLogger(directory, rank, progress, spec.run.storage_timeout, lambda: stop.signal, fence)
    topology = Topology.from_spec(spec)
    if rank < topology.world:
        progress.coordinates = topology.coordinates(rank)
    record.claim_run()
    record.reserve_outcome_space()
    record.phase("joining")
    device, problem = init_process_group(spec)
    try:
        raise_on_all_ranks(_check_world_size(topology) or problem, step=0)
        fence.number = _of_rank_0(fence.number)
        record.phase("building")
        set_backend_flags(spec, device)
        ending = entrypoint(spec, make_mesh(topology, device, rank), directory, record, stop)
    except RunEnd as planned:
        ending = planned
    try:
        _write_ending(record, ending)
    finally:  # also if the outcome could not be written: the other ranks wait in the barrier
        destroy_process_group()


def _write_ending(record: RunLogger, ending: RunEnd) -> None:
    """Write what still waits for the storage, then the outcome. Raises a CheckpointError on rank 0 if that fails."""

    def waiting() -> None:
        record.heartbeat(STORAGE, ending.step)

    with contextlib.suppress(CheckpointError):  # the outcome has space reserved for it
        retry_while_storage_fails(record, partial(run_on_rank0, record.flush), waiting)
    try:
        retry_while_storage_fails(record, partial(run_on_rank0, partial(record.outcome, ending)), waiting)
    except CheckpointError:
        if record.is_first:
            raise


def _of_rank_0(number: int | None) -> int | None:
    claimed = all_gather_objects(number)[0]
    return claimed if isinstance(claimed, int) else None


def _check_world_size(topology: Topology) -> RankError | None:
    """Return an error if the number of workers, which may be started by hand, is not the spec's world size."""
    started = dist.get_world_size()
    if started == topology.world:
        return None
    return RankError(
        ExitCode.CONFIGURATION,
        f"the spec is laid out over {topology.world} workers ({topology.nodes} machines with "
        f"{topology.devices_per_node} each), but {started} were started: set torchrun's --nnodes and --nproc-per-node",
    )
