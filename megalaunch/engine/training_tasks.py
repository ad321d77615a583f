"""Tasks of lm-eval during training: the training model, under its layout, as lm-eval's model.

Every rank runs lm-eval on the same questions, since each forward pass is collective. Random states are restored
afterwards, so that training continues as without tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager, get_task_dict
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.inference.chat_template import stop_token_ids
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.load_model import ModelSource
from megalaunch.engine.lm_eval_adapter import LMEvalModel, TaskScore, index_tasks, read_scores
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.parallel.pipeline_forward import DistributedGenerator
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.run_end import RankError
from megalaunch.engine.scored_pairs import PairError
from megalaunch.engine.train.forward_backward import make_pipeline_forward
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.row_scorer import RowScorer
from megalaunch.engine.train.trainer import TrainState
from megalaunch.engine.train.validator import MayContinue
from megalaunch.rundir.metrics import task_key
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory


class TrainingModelTasks:
    """Evaluates the tasks of `train.eval_tasks` with the model that is being trained (`TaskEvaluator`).

    The constructor loads tasks and data, so that what is missing ends the run at its start. Every method is collective.

    Raises:
        RunEnd: On every rank, if a task is unknown or its data is missing on any rank.
    """

    def __init__(self, state: TrainState, directory: RunDirectory) -> None:
        self._state, self._settings = state, state.spec.train.eval_tasks
        problem, opened = None, None
        try:
            opened = _open_source(state, directory)
        except DataError as error:
            problem = RankError(ExitCode.DATA, f"train.eval_tasks needs the run's tokenizer: {error}")
        raise_on_all_ranks(problem, step=0)
        assert opened is not None, "a rank with a problem does not come here"
        self._model = _TrainingModel(state, opened, self._settings.batch_size)
        first = run_on_rank0(self._load_problem)  # the first rank downloads, the others find the data in the cache
        raise_on_all_ranks(first or self._load_problem(), step=0)

    def __call__(self, may_continue: MayContinue) -> Mapping[str, float] | None:
        """Return the scores by key of metrics.jsonl; None if a stop signal interrupted the tasks."""
        self._model.may_continue = may_continue
        settings = self._state.spec.train.eval_tasks
        with _random_states_restored(self._state.mesh.device):
            try:
                found = simple_evaluate(
                    model=self._model,
                    tasks=list(settings.names),
                    num_fewshot=settings.num_fewshot,
                    limit=settings.limit,
                    task_manager=self._task_manager,
                    log_samples=False,
                    bootstrap_iters=0,
                )
            except _Interrupted:
                return None
            finally:
                self._state.forward_backward.release()
        # lm-eval gives results to the first process of a machine only.
        return run_on_rank0(lambda: {_key(one): float(one.value) for one in read_scores(found)})

    @cached_property
    def _task_manager(self) -> TaskManager:
        folder = self._settings.include_path
        return index_tasks(self._settings.names, None if folder is None else Path(folder).expanduser())

    def _load_problem(self) -> RankError | None:
        """Load the tasks and their data; return the error, if any."""
        settings = self._state.spec.train.eval_tasks
        with _random_states_restored(self._state.mesh.device):
            manager = self._task_manager
            unknown = [name for name in settings.names if not manager.match_tasks([name])]
            if unknown:
                reason = f"train.eval_tasks.names: lm-eval has no task {', '.join(unknown)} (`lm-eval ls tasks`)"
                return RankError(ExitCode.CONFIGURATION, reason)
            try:
                get_task_dict(list(settings.names), manager)
            except Exception as error:  # whatever the code of a task raises
                reason = f"train.eval_tasks: the tasks cannot be loaded: {type(error).__name__}: {str(error)[:300]}"
                return RankError(ExitCode.DATA, reason)
        return None


def _key(score: TaskScore) -> str:
    return task_key(score.task, score.metric if score.filter == "none" else f"{score.metric},{score.filter}")


class _Interrupted(Exception):
    """A stop signal came during an evaluation; raised on all ranks."""


class _TrainingModel(LMEvalModel):
    """lm-eval's interface over the training model."""

    def __init__(self, state: TrainState, source: ModelSource, batch_size: int) -> None:
        self.may_continue: MayContinue = lambda problem: True
        forward_only = make_pipeline_forward(state.spec, state.mesh, state.model)
        generator = _InterruptibleGenerator(DistributedGenerator(state.model, state.mesh, forward_only), self._check)
        super().__init__(source, batch_size, computing=generator)
        self._scorer = RowScorer(state.model, state.mesh, forward_only, state.forward_backward.release)

    def _check(self) -> None:
        if not self.may_continue(None):
            raise _Interrupted

    def score_pairs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield the log-likelihood of each pair by its number, computed by all ranks together.

        A pair that cannot be scored ends the run on all ranks.
        """
        try:
            scores = self._scorer.score(pairs, self.batch_size, self.max_length, self._check)
        except PairError as error:
            self.may_continue(RankError(ExitCode.DATA, f"train.eval_tasks: {error}"))
            raise
        yield from enumerate(scores)


class _InterruptibleGenerator:
    """A text model that checks for a stop signal before each forward pass."""

    def __init__(self, inner: DistributedGenerator, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check

    @property
    def config(self) -> DecoderConfig:
        """The config of the full decoder."""
        return self._inner.config

    @property
    def device(self) -> torch.device:
        """The device of token ids and logits."""
        return self._inner.device

    def __call__(self, tokens_BS: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:
        """Return the logits of the last position, [B, 1, V]. Collective."""
        self._check()
        return self._inner(tokens_BS, positions, kv_cache)


def _open_source(state: TrainState, directory: RunDirectory) -> ModelSource:
    """Return the run's tokenizer and spec as lm-eval needs them. Raises DataError."""
    saved, named = directory.tokenizer, state.spec.tokenizer.path  # a new run has not saved its own yet
    if not saved.is_file() and named is None:
        raise DataError("the run has none", fix="Set tokenizer.path.")
    tokenizer = load_tokenizer(saved if saved.is_file() else Path(str(named)))
    files = {path.name: path for path in sorted(directory.origin.iterdir())} if directory.origin.is_dir() else {}
    ends = stop_token_ids(files, {}, tokenizer)
    special = state.spec.data.add_special_tokens
    return ModelSource(directory.root, state.spec, tokenizer, files, ends, add_special_tokens=special)


@contextmanager
def _random_states_restored(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, which lm-eval seeds."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if platform_of(device).has_streams else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
