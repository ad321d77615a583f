"""A text worker's life: join, lay the model out, load its weights, answer the job, say how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.paths import replaced
from megalaunch.data.errors import DataError
from megalaunch.data.validation_samples import FiniteRows
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.initial import load_initial
from megalaunch.engine.checkpoint.ranks import on_every_rank
from megalaunch.engine.ending import Ending, Problem
from megalaunch.engine.group import join, leave
from megalaunch.engine.inference.ask import answers_by, length_note, tokens_of
from megalaunch.engine.inference.cache import TextCache
from megalaunch.engine.inference.load import ModelSource, read_source
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.relay import TextRelay
from megalaunch.engine.parallel.tied import renew_tied_head
from megalaunch.engine.process import StopRequest
from megalaunch.engine.score import HEAD_CHUNKS, length_of_rows, scores_by
from megalaunch.engine.texts.job import Answer, Job, Note, ScoreJob, WriteJob, answers_file, read_job, record_of
from megalaunch.engine.train.agreement import agree_to_stop
from megalaunch.engine.train.assemble import give_memory, laid_out
from megalaunch.engine.train.evaluate import summed_loss
from megalaunch.engine.train.passes import passes_of, relay_of
from megalaunch.engine.train.record import Record
from megalaunch.plan.topology import Topology
from megalaunch.rundir.lines import append_line
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


def answer(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopRequest) -> None:
    """From a worker's start to its exit: the weights are those of `checkpoint.initialize_from`.

    Of a stop request nothing comes but its end by the launcher: there is nothing to save.
    """
    record = Record(directory, rank, progress)
    topology = Topology.of(spec)
    progress.coordinates = topology.coordinates(rank)
    record.phase("joining")
    device, problem = join(spec)
    try:
        if problem is not None:  # the same on every rank
            raise Ending(problem.exit_code, problem.reason, 0)
        do_job(spec, make_mesh(topology, device, rank), directory, record)
        ending = Ending(ExitCode.DONE, "answered", 0)
    except Ending as planned:
        ending = planned
    try:
        record.outcome(ending)
    finally:  # one that could not be written must not keep the others waiting
        leave()


def do_job(spec: RunSpec, mesh: Mesh, directory: RunDirectory, record: Record) -> None:
    """Lay the model out, load its weights and answer the job of the directory. Collective.

    Raises an Ending, the same on every rank, for what is wrong with the source, the job or its data.
    """
    path = Path(spec.checkpoint.initialize_from or "")
    record.phase("building")
    model = laid_out(spec, mesh)
    give_memory(model, mesh)
    record.phase("loading")
    try:
        source = _opened(path)
        load_initial(path, spec.model, model)
        renew_tied_head(model, mesh)
        record.phase("answering")
        job = read_job(directory)
        if job.no_bos:
            source = replace(source, add_special_tokens=False)
        for one in _answers(_Laid(spec, mesh, model, source, record), job):
            if record.is_first:
                append_line(answers_file(directory), record_of(one))
    except CheckpointError as error:
        raise Ending(ExitCode.CHECKPOINT, str(error), 0) from error
    except DataError as error:
        raise Ending(ExitCode.DATA, str(error), 0) from error


def _opened(path: Path) -> ModelSource:
    """Collective; raises the same CheckpointError on every rank."""
    opened: list[ModelSource] = []
    on_every_rank(lambda: opened.append(read_source(path)))
    return opened[0]


@dataclass(frozen=True)
class _Laid:
    """A model that lies over the ranks, with its weights, and where it came from."""

    spec: RunSpec
    mesh: Mesh
    model: ModelParts
    source: ModelSource
    record: Record


def _answers(laid: _Laid, job: Job) -> Iterator[Answer]:
    try:
        answers = _written(laid, job) if isinstance(job, WriteJob) else _scored(laid, job)
    except ValueError as error:  # what was asked cannot be
        raise Ending(ExitCode.CONFIGURATION, str(error), 0) from error
    yield from answers


def _written(laid: _Laid, job: WriteJob) -> Iterator[Answer]:
    tokens = tokens_of(laid.source, job.prompts)
    texts = answers_by(_TextModel(laid), laid.source, tokens, job.ask)
    note = length_note(laid.source, tokens, job.ask.max_new_tokens)
    return chain([Note(note)] if note else [], texts)


def _scored(laid: _Laid, job: ScoreJob) -> Iterator[Answer]:
    length = length_of_rows(laid.source, job.sequence_length)
    moves = partial(laid.record.at, "answering", 0)
    return scores_by(partial(_summed, laid, job.batch_size), laid.source, job.data, length, job.json_key, moves)


def _summed(laid: _Laid, batch_size: int, rows: FiniteRows) -> tuple[float, int]:
    spec = replaced(laid.spec, {"train.loss_chunks": HEAD_CHUNKS})
    passes = passes_of(spec, laid.mesh, laid.model)

    def may_go_on(problem: Problem | None) -> bool:
        laid.record.at("answering", 0)
        agree_to_stop(None, problem, 0, laid.mesh.device)
        return True

    sums = summed_loss(passes, rows, batch_size, laid.mesh, may_go_on)
    assert sums is not None, "nothing cuts it short"
    return float(sums[0]), int(sums[1])


class _TextModel:
    """The model as a generator of text sees it, telling progress."""

    def __init__(self, laid: _Laid) -> None:
        self._relay = TextRelay(laid.model, laid.mesh, relay_of(laid.spec, laid.mesh, laid.model))
        self._record = laid.record

    @property
    def config(self) -> DecoderConfig:
        """Of the whole decoder."""
        return self._relay.config

    @property
    def device(self) -> torch.device:
        """Where tokens have to be."""
        return self._relay.device

    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: TextCache) -> Tensor:
        """Logits of the last position, [B, 1, V]. Collective."""
        self._record.at("answering", 0)
        return self._relay(tokens_BS, positions, stores)
