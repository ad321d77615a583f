"""Run one training rank: initialize the process group, build the state, resume, train, write the outcome."""

from __future__ import annotations

import torch.distributed as dist

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.inference.sample import sample_text
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.parallel.pipeline_forward import DistributedGenerator
from megalaunch.engine.process_group import destroy_process_group, init_process_group
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.build import build_train_state
from megalaunch.engine.train.forward_backward import make_pipeline_forward
from megalaunch.engine.train.rank_sync import all_gather_objects, raise_on_all_ranks
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.trainer import Trainer, TrainState
from megalaunch.engine.worker_setup import StopSignal, tune_malloc
from megalaunch.plan.topology import Topology
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def run_training(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopSignal) -> None:
    """Train one rank; return when all ranks have come to the same controlled end. Collective."""
    record = RunLogger(directory, rank, progress)
    topology = Topology.from_spec(spec)
    if rank < topology.world:
        progress.coordinates = topology.coordinates(rank)
    record.reserve_outcome_space()
    record.phase("joining")
    device, problem = init_process_group(spec)
    try:
        raise_on_all_ranks(_check_world_size(topology) or problem, step=0)
        record.phase("building")
        if device.type == "cpu":
            tune_malloc()
        ending = _train(build_train_state(spec, make_mesh(topology, device, rank)), directory, record, stop)
    except RunEnd as planned:
        ending = planned
    try:
        record.outcome(ending)
    finally:  # also if the outcome could not be written: the other ranks wait in the barrier
        destroy_process_group()


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


def _train(state: TrainState, directory: RunDirectory, record: RunLogger, stop: StopSignal) -> RunEnd:
    loop = Trainer(state, directory, record, stop)
    try:
        loop.resume()
        ending = loop.run()
    except CheckpointError as error:  # the same on every rank
        raise RunEnd(ExitCode.CHECKPOINT, str(error), loop.step) from error
    if ending.exit_code == ExitCode.DONE and loop.step >= state.spec.train.steps:
        _generate_final_sample(state, directory, record)
    return ending


def _generate_final_sample(state: TrainState, directory: RunDirectory, record: RunLogger) -> None:
    """Generate `train.sample_prompt`'s continuation. Failures are only logged: the model is trained and saved."""
    spec = state.spec
    if not spec.train.sample_prompt or spec.tokenizer.path is None:
        return
    record.phase("sampling")
    tokenizer, missing = None, None
    try:
        tokenizer = load_tokenizer(directory.tokenizer)
    except DataError as error:
        missing = str(error)
    reasons = [reason for reason in all_gather_objects(missing) if reason]
    if tokenizer is None or reasons:
        record.event("note", message=f"no sample was written: {reasons[0]}")
        return
    try:
        record.sample(sample_text(spec, _as_generator(state), tokenizer))
    except ValueError as error:  # the same on every rank
        record.event("note", message=f"no sample was written: {error}")


def _as_generator(state: TrainState) -> DistributedGenerator:
    relay = make_pipeline_forward(state.spec, state.mesh, state.model)
    return DistributedGenerator(state.model, state.mesh, relay)
