"""One worker's life: join, build, resume, train, say how it ended."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.ending import Ending
from megalaunch.engine.group import join, leave, local_device
from megalaunch.engine.inference.sample import sample_text
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.process import StopRequest
from megalaunch.engine.train.agreement import gather_objects
from megalaunch.engine.train.assemble import assemble
from megalaunch.engine.train.loop import Loop, Trainee
from megalaunch.engine.train.record import Record
from megalaunch.plan.topology import Topology
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def live(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopRequest) -> None:
    """Everything between a worker's start and its exit; returns when all ranks ended on purpose together."""
    record = Record(directory, rank, progress)
    topology = Topology.of(spec)
    progress.coordinates = topology.coordinates(rank)
    record.phase("joining")
    device, problem = local_device(spec)
    join(spec, device)
    try:
        ending = _train(spec, directory, record, stop, topology, rank, device, problem)
    except Ending as planned:
        ending = planned
    if record.is_first:
        write_outcome(directory.outcome, Outcome(ending.exit_code, ending.reason, ending.step, ending.details))
        record.event("outcome", exit_code=int(ending.exit_code), reason=ending.reason)
    leave()


def _train(
    spec: RunSpec,
    directory: RunDirectory,
    record: Record,
    stop: StopRequest,
    topology: Topology,
    rank: int,
    device: torch.device,
    problem: str | None,
) -> Ending:
    problems = [text for text in gather_objects(problem) if text]
    if problems:
        raise Ending(ExitCode.CONFIGURATION, str(problems[0]), 0)
    record.phase("building")
    trainee = _assembled(spec, topology, device, rank)
    loop = Loop(trainee, directory, record, stop)
    try:
        loop.resume()
        ending = loop.run()
    except CheckpointError as error:  # the same on every rank
        raise Ending(ExitCode.CHECKPOINT, str(error), loop.step) from error
    if ending.exit_code == ExitCode.DONE and loop.step >= spec.train.steps:
        record.phase("sampling")
        text = sample_text(spec, trainee.model)
        if text is not None and record.is_first:
            directory.sample.write_text(text, encoding="utf-8")
    return ending


def _assembled(spec: RunSpec, topology: Topology, device: torch.device, rank: int) -> Trainee:
    """The trainee, or an Ending on every rank when any of them cannot read the data."""
    trainee, problem = None, None
    try:
        trainee = assemble(spec, make_mesh(topology, device, rank))
    except DataError as error:
        problem = str(error)
    problems = [text for text in gather_objects(problem) if text]
    if problems or trainee is None:
        raise Ending(ExitCode.DATA, str(problems[0]), 0)
    return trainee
