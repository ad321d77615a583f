"""The body of a rank of distributed generation or evaluation: build the sharded model, load weights, run the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.checkpoint.coordination import run_on_all_ranks
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.load_pretrained import load_pretrained
from megalaunch.engine.inference.jobs import (
    Answer,
    EvaluateJob,
    GenerateJob,
    Job,
    JobWarning,
    answers_file,
    read_job,
    to_record,
)
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.load_model import ModelSource, read_source
from megalaunch.engine.inference.perplexity import HEAD_CHUNKS, eval_sequence_length, scores_by
from megalaunch.engine.inference.request import generate_with, length_note, tokenize_prompts
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.parallelize import materialize, parallelize_decoder
from megalaunch.engine.parallel.pipeline_forward import DistributedGenerator
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.evaluate import evaluate_loss_sum
from megalaunch.engine.train.forward_backward import make_forward_backward, make_pipeline_forward
from megalaunch.engine.train.rank_sync import sync_stop_signal
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import with_value


def answer_job(spec: RunSpec, mesh: Mesh, directory: RunDirectory, record: RunLogger, stop: StopSignal) -> RunEnd:
    """Run the job of a run directory with the weights of `checkpoint.load_pretrained` (`RankEntrypoint`). Collective.

    Stop requests are ignored: the launcher kills the worker, and there is no state to save.

    Raises:
        RunEnd: The same on every rank, for errors in the source of the weights, the job or its data.
    """
    del stop
    path = Path(spec.checkpoint.load_pretrained or "")
    model = parallelize_decoder(spec, mesh)
    materialize(model, mesh)
    record.phase("loading")
    try:
        source = _open_source_on_all_ranks(path)
        load_pretrained(path, spec.model, model)
        model.copy_embedding()
        record.phase("answering")
        job = read_job(directory)
        if job.no_bos:
            source = replace(source, add_special_tokens=False)
        for one in _answers(_DistributedModel(spec, mesh, model, source, record), job):
            if record.is_first:
                append_line(answers_file(directory), to_record(one))
    except CheckpointError as error:
        raise RunEnd(ExitCode.CHECKPOINT, str(error), 0) from error
    except DataError as error:
        raise RunEnd(ExitCode.DATA, str(error), 0) from error
    return RunEnd(ExitCode.DONE, "answered", 0)


def _open_source_on_all_ranks(path: Path) -> ModelSource:
    """Read the source of the weights on every rank. Collective; raises the same CheckpointError on every rank."""
    opened: list[ModelSource] = []
    run_on_all_ranks(lambda: opened.append(read_source(path)))
    return opened[0]


@dataclass(frozen=True)
class _DistributedModel:
    """A model sharded over the ranks, with its weights, and the source of its weights and tokenizer."""

    spec: RunSpec
    mesh: Mesh
    model: ModelParts
    source: ModelSource
    record: RunLogger


def _answers(distributed: _DistributedModel, job: Job) -> Iterator[Answer]:
    try:
        answers = _generate(distributed, job) if isinstance(job, GenerateJob) else _evaluate(distributed, job)
    except ValueError as error:  # the request is invalid
        raise RunEnd(ExitCode.CONFIGURATION, str(error), 0) from error
    yield from answers


def _generate(distributed: _DistributedModel, job: GenerateJob) -> Iterator[Answer]:
    tokens = tokenize_prompts(distributed.source, job.prompts)
    texts = generate_with(_GenerationModel(distributed), distributed.source, tokens, job.request)
    note = length_note(distributed.source, tokens, job.request.max_new_tokens)
    return chain([JobWarning(note)] if note else [], texts)


def _evaluate(distributed: _DistributedModel, job: EvaluateJob) -> Iterator[Answer]:
    length = eval_sequence_length(distributed.source, job.sequence_length)
    moves = partial(distributed.record.heartbeat, "answering", 0)
    return scores_by(
        partial(_sum_over_ranks, distributed, job.batch_size), distributed.source, job.data, length, job.json_key, moves
    )


def _sum_over_ranks(distributed: _DistributedModel, batch_size: int, rows: FiniteDataset) -> tuple[float, int]:
    spec = with_value(distributed.spec, {"train.loss_chunks": HEAD_CHUNKS})
    forward_backward = make_forward_backward(spec, distributed.mesh, distributed.model)

    heartbeat = partial(distributed.record.heartbeat, "answering", 0)

    def may_continue(problem: RankError | None) -> bool:
        sync_stop_signal(None, problem, 0, distributed.mesh.device)
        return True

    sums = evaluate_loss_sum(forward_backward, rows, batch_size, distributed.mesh, may_continue, heartbeat)
    assert sums is not None, "nothing cuts it short"
    return float(sums[0]), int(sums[1])


class _GenerationModel:
    """Adapter from a distributed model to the interface of text generation; records progress on every call."""

    def __init__(self, distributed: _DistributedModel) -> None:
        self._relay = DistributedGenerator(
            distributed.model,
            distributed.mesh,
            make_pipeline_forward(distributed.spec, distributed.mesh, distributed.model),
        )
        self._record = distributed.record

    @property
    def config(self) -> DecoderConfig:
        """The config of the full decoder, over all stages."""
        return self._relay.config

    @property
    def device(self) -> torch.device:
        """The device on which input tokens are expected."""
        return self._relay.device

    def __call__(self, tokens_BS: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:
        """Return the logits of the last position, [B, 1, V], with the KV cache in `kv_cache`. Collective."""
        self._record.heartbeat("answering", 0)
        return self._relay(tokens_BS, positions, kv_cache)
