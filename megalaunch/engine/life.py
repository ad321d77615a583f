"""One worker's life: join, build, resume, train, say how it ended."""

from __future__ import annotations

import torch.distributed as dist

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.ending import Ending, Problem
from megalaunch.engine.group import join, leave
from megalaunch.engine.inference.sample import sample_text
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.parallel.relay import TextRelay
from megalaunch.engine.process import StopRequest, keep_freed_memory
from megalaunch.engine.train.agreement import end_together, gather_objects
from megalaunch.engine.train.assemble import assemble
from megalaunch.engine.train.loop import Loop, Trainee
from megalaunch.engine.train.passes import relay_of
from megalaunch.engine.train.record import Record
from megalaunch.plan.topology import Topology
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def live(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopRequest) -> None:
    """Everything between a worker's start and its exit; returns when all ranks ended on purpose together."""
    record = Record(directory, rank, progress)
    topology = Topology.of(spec)
    if rank < topology.world:
        progress.coordinates = topology.coordinates(rank)
    record.reserve_outcome()
    record.phase("joining")
    device, problem = join(spec)
    try:
        end_together(_wrong_world(topology) or problem, step=0)
        record.phase("building")
        if device.type == "cpu":
            keep_freed_memory()
        ending = _train(assemble(spec, make_mesh(topology, device, rank)), directory, record, stop)
    except Ending as planned:
        ending = planned
    try:
        record.outcome(ending)
    finally:  # one that could not be written must not keep the others waiting
        leave()


def _wrong_world(topology: Topology) -> Problem | None:
    """Workers started by hand may be too few or too many."""
    started = dist.get_world_size()
    if started == topology.world:
        return None
    return Problem(
        ExitCode.CONFIGURATION,
        f"the spec is laid out over {topology.world} workers ({topology.nodes} machines with "
        f"{topology.devices_per_node} each), but {started} were started: set torchrun's --nnodes and --nproc-per-node",
    )


def _train(trainee: Trainee, directory: RunDirectory, record: Record, stop: StopRequest) -> Ending:
    loop = Loop(trainee, directory, record, stop)
    try:
        loop.resume()
        ending = loop.run()
    except CheckpointError as error:  # the same on every rank
        raise Ending(ExitCode.CHECKPOINT, str(error), loop.step) from error
    if ending.exit_code == ExitCode.DONE and loop.step >= trainee.spec.train.steps:
        _write_sample(trainee, directory, record)
    return ending


def _write_sample(trainee: Trainee, directory: RunDirectory, record: Record) -> None:
    """The model is trained and saved: whatever keeps it from writing a sample is worth a note, and no more."""
    spec = trainee.spec
    if not spec.train.sample_prompt or spec.tokenizer.path is None:
        return
    record.phase("sampling")
    tokenizer, missing = None, None
    try:
        tokenizer = load_tokenizer(directory.tokenizer)
    except DataError as error:
        missing = str(error)
    reasons = [reason for reason in gather_objects(missing) if reason]
    if tokenizer is None or reasons:
        record.event("note", message=f"no sample was written: {reasons[0]}")
        return
    try:
        record.sample(sample_text(spec, _text_model(trainee), tokenizer))
    except ValueError as error:  # the same on every rank
        record.event("note", message=f"no sample was written: {error}")


def _text_model(trainee: Trainee) -> TextRelay:
    relay = relay_of(trainee.spec, trainee.mesh, trainee.model)
    return TextRelay(trainee.model, trainee.mesh, relay)
