"""A small run by the real loop on forked ranks, without launcher and agent: its spec, one rank's part, its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import VOCABULARY, device_type, rank_mesh, small_spec
from token_files import write_tokens

from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.trainer import Trainer, TrainState, build_train_state
from megalaunch.engine.train_rank import open_tasks
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.plan.topology import Topology
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import write_spec

# Of a line in metrics.jsonl, what does not depend on the clock or the machine.
SAME = (
    *("step", "loss", "grad_norm", "learning_rate", "weight_decay", "tokens", "loss_scale", "skipped_steps"),
    *("validation_loss", "validation_loss/first", "validation_loss/blend"),
)


@dataclass
class Rank:
    """One rank's part of a run about to begin, for a test to spoil."""

    rank: int
    trainee: TrainState
    stop: StopSignal

    def during(self, data: str, action: Callable[[int], None]) -> None:
        """Call `action(index)` before every read of a row of "training" or "validation"."""
        samples = getattr(self.trainee, data)

        class Watched(type(samples)):
            def __getitem__(self, index):
                action(index)
                return super().__getitem__(index)

        samples.__class__ = Watched


def ten_steps(folder: Path) -> RunSpec:
    """The resolved spec of a run of ten steps on two ranks, with its token files in `folder`."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, VOCABULARY, size).tolist() for size in random.integers(5, 90, 60)]
    train = write_tokens(folder / "train", documents)
    validation = write_tokens(folder / "validation", documents[:9])
    return small_spec(
        data__train_prefix=str(train),
        data__validation_prefix=str(validation),
        data__num_samples=80,
        train__steps=10,
        train__validation_interval=3,
        schedule__shape="cosine",
        schedule__decay_steps=10,
        schedule__warmup_steps=2,
        parallel__dp=2,
    )


def run_loop(
    spec: RunSpec, root: Path, spoil: Callable[[Rank], None] = lambda rank: None, timeout: float = 60
) -> RunEnd:
    """Run on forked ranks, from the newest checkpoint to the end; all ranks have to end alike."""
    world, device = Topology.from_spec(spec).world, device_type(spec)
    code, reason, step = _same_on_all(run_ranks(world, _one_rank, spec, root, spoil, timeout=timeout, device=device))
    return RunEnd(code, reason, step)


def _one_rank(spec: RunSpec, root: Path, spoil: Callable[[Rank], None]) -> tuple[object, ...]:
    directory = prepared_directory(spec, root)
    number = dist.get_rank()
    trainee = build_train_state(spec, rank_mesh(spec))
    record = RunLogger(directory, number, ProgressWriter(directory.progress(number), number, 0))
    rank = Rank(number, trainee, StopSignal())
    spoil(rank)
    try:
        loop = Trainer(trainee, directory, record, rank.stop, open_tasks(trainee, directory))
        loop.resume()
        ending = loop.run()
    except RunEnd as planned:
        ending = planned
    return ending.exit_code, ending.reason, ending.step


def prepared_directory(spec: RunSpec, root: Path) -> RunDirectory:
    """The run directory as the launcher would leave it for the workers. Collective."""
    directory = RunDirectory(root)
    for folder in (directory.logs, directory.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        write_spec(spec, directory.spec)
    dist.barrier()
    return directory


def _same_on_all(answers: list[tuple[object, ...]]) -> tuple[object, ...]:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def metrics(root: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock or the machine."""
    return [{key: line[key] for key in SAME if key in line} for line in read_lines(RunDirectory(root).metrics)]


def events(root: Path, name: str) -> list[dict]:
    """The events of one name."""
    return [line for line in read_lines(RunDirectory(root).events) if line["event"] == name]
