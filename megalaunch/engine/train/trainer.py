"""The training loop: resume, then train, log, validate and save until the last step or a stop signal."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset, build_validation_sets
from megalaunch.data.samples.sample import Dataset
from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.retention import remove_checkpoints_after
from megalaunch.engine.measure.step_profiler import StepProfiler
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.build import build_optimizer
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import materialize, parallelize_decoder
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.run_end import RankError, RunEnd, exit_code_of
from megalaunch.engine.train.bad_steps import HISTORY, BadStep, LeftOutBatches, LossHistory
from megalaunch.engine.train.checkpointer import Checkpointer, save_tokenizer, true_vocab_size
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.early_stopping import count_validation, is_stopped, stop_reason
from megalaunch.engine.train.forward_backward import ForwardBackward, make_forward_backward
from megalaunch.engine.train.garbage import StepGarbage
from megalaunch.engine.train.local_checkpointer import LocalCheckpointer
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.rank_sync import raise_on_all_ranks, sync_stop_signal
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.run_start import RunStart
from megalaunch.engine.train.step_guards import ExpertCollapseGuard, ZeroGradientGuard
from megalaunch.engine.train.storage_retry import STORAGE, retry_while_storage_fails
from megalaunch.engine.train.stragglers import StragglerDetector
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.engine.train.validator import TaskEvaluator, Validator
from megalaunch.engine.train.weight_hashes import WeightHashes
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.metrics import VALIDATION_LOSS, validation_key
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory, checkpoint_step
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class TrainState:
    """The objects of a training run on one rank: spec, mesh, model, optimizer, data sets.

    `validation` is the run's own validation data; `validation_sets` are the named ones.
    """

    spec: RunSpec
    mesh: Mesh
    model: ModelParts
    forward_backward: ForwardBackward
    optimizer: Optimizer
    training: Dataset
    validation: FiniteDataset | None
    validation_sets: Mapping[str, FiniteDataset] = field(default_factory=dict)

    @property
    def evaluated(self) -> Mapping[str, FiniteDataset]:
        """All validation data by key of metrics.jsonl."""
        own = {} if self.validation is None else {VALIDATION_LOSS: self.validation}
        return {**own, **{validation_key(name): dataset for name, dataset in self.validation_sets.items()}}


def build_train_state(spec: RunSpec, mesh: Mesh) -> TrainState:
    """Build the training state without weights, which `Trainer.resume` initializes or loads. Collective.

    Raises:
        RunEnd: On every rank, if any rank cannot open its data.
    """
    model = parallelize_decoder(spec, mesh)
    materialize(model, mesh)
    training, validation, validation_sets = _open_datasets(spec)
    return TrainState(
        spec,
        mesh,
        model,
        make_forward_backward(spec, mesh, model),
        build_optimizer(spec, mesh, model),
        training,
        validation,
        validation_sets,
    )


def _open_datasets(spec: RunSpec) -> tuple[Dataset, FiniteDataset | None, Mapping[str, FiniteDataset]]:
    opened, problem = None, None
    try:
        opened = build_train_dataset(spec), build_valid_dataset(spec), build_validation_sets(spec)
    except (DataError, OSError) as error:
        problem = RankError(ExitCode.DATA, str(error))
    raise_on_all_ranks(problem, step=0)
    assert opened is not None, "a rank with a problem does not come here"
    return opened


class Trainer:
    """The training loop of one rank. Every method is collective, and raises a RunEnd on all ranks or on none."""

    def __init__(
        self,
        state: TrainState,
        directory: RunDirectory,
        record: RunLogger,
        stop: StopSignal,
        tasks: TaskEvaluator | None = None,
    ) -> None:
        self._state, self._directory, self._record, self._stop = state, directory, record, stop
        self._spec, self._mesh = state.spec, state.mesh
        self._batch_sampler = make_batch_sampler(state.spec, state.mesh)
        self._progress, self._first_step = TrainProgress(step=0, tokens=0), 0
        self._saver = Checkpointer(state.spec, directory, state.model, state.optimizer, record)
        self._local = LocalCheckpointer(state.spec, directory, state.model, state.optimizer, record, self._saver)
        self._start = RunStart(state.spec, directory, state.model, state.optimizer, record, self._saver, self._local)
        self._zero_gradients = ZeroGradientGuard(state.spec.train.max_zero_grad_steps)
        self._history = LossHistory(state.spec.train)
        self._left_out = LeftOutBatches(state.spec.train, directory, record.fence)
        self._expert_collapse = ExpertCollapseGuard(state.spec, state.model.config.expert_layers)
        self._stragglers = StragglerDetector(state.spec, state.mesh)
        self._profiler = StepProfiler(state.spec.logging, directory, state.mesh.rank, state.mesh.device)
        self._weight_hashes = WeightHashes(state.spec, state.mesh, state.model, state.optimizer)
        self._stop_signal: signal.Signals | None = None  # the same on all ranks
        self._validator = Validator(
            state.spec,
            state.mesh,
            state.forward_backward,
            state.evaluated,
            self._batch_sampler.micro_batch_size,
            record,
            tasks,
        )
        self._validation: float | None = None
        self._loss: float | None = None

    @property
    def step(self) -> int:
        """Number of the last finished step."""
        return self._progress.step

    def resume(self) -> None:
        """Load the newest valid checkpoint, or initial weights, and drop the metrics of later steps.

        Starts from initial weights only if no checkpoint was ever saved.

        Raises:
            CheckpointError: All saved checkpoints are damaged or gone.
        """
        self._record.phase("looking for checkpoints", 0)
        save_tokenizer(self._directory, self._spec)
        self._progress = self._start.load()
        self._left_out.load()
        num_tokens = run_on_rank0(partial(true_vocab_size, self._directory, self._spec))
        self._state.model.set_true_vocab_size(num_tokens)
        self._restore_records()
        self._record.report_logging_gap(self.step)

    def _restore_records(self) -> None:
        """Drop the metrics of later steps, and take from the others what the loop remembers."""
        self._retry(partial(self._local.begin_at, self.step))
        self._record.truncate_metrics_after(self.step)
        self._saver.sync_metrics(self._progress)  # what follows reads the file
        self._validator.resume()
        self._weight_hashes.begin_at(self.step)
        self._history.restore(run_on_rank0(partial(self._record.last_losses, HISTORY)))

    def run(self) -> RunEnd:
        """Train to the last step, the time limit or a stop signal; return how it ended, or raise."""
        batches = PrefetchingDataLoader(
            self._state.training,
            self._batch_sampler,
            self._mesh.device,
            waiting=lambda step: self._record.heartbeat("waiting for tokens", step),
            mtp_depths=self._spec.model.mtp.num_layers,
        )
        step = TrainStep(
            self._spec,
            self._mesh,
            self._state.model,
            self._state.forward_backward,
            self._state.optimizer,
            self._state.training,
            self._stragglers.clock,
            self._progress.updates,
            self._history,
        )
        self._first_step = self.step
        try:
            with StepGarbage() as garbage:
                self._sync_stop_signal()
                self._require_early_stopping_metric()
                self._validate_if_due()
                self._record.phase("training", self.step)
                while self._stop_signal is None and self.step < self._last_step and not self._stopped_early:
                    self._one_step(step, batches)
                    self._weight_hashes.check_if_due(self.step)
                    self._validate_if_due()
                    self._save_if_due()
                    garbage.collect_if_due(self.step)
        except RunEnd as ending:
            self._local.finish(ending.reason)
            self._saver.background.finish(ending.reason)
            raise
        finally:
            batches.close()
        if self._stop_signal is not None and self._stop_signal != signal.SIGALRM:
            self._record.event("stop_requested", signal=self._stop_signal.name)
        if self.step > 0:
            self._weight_hashes.check_before_save(self.step)
            self._local.wait(self._progress)
            self._saver.save(self._progress)
            self._local.remove()
        self._record.phase("ending", self.step)
        return self._run_end()

    @property
    def _last_step(self) -> int:
        return min(self._spec.train.steps, self._spec.train.exit_at_step or self._spec.train.steps)

    @property
    def _problem(self) -> RankError | None:
        """Error of this rank in logging or in an asynchronous save, not yet shared with the other ranks."""
        return self._record.problem or self._saver.background.problem or self._local.problem

    @property
    def _stop_request(self) -> signal.Signals | None:
        """The signal that this rank has received, or SIGALRM once the time limit is over.

        The limit counts neither before the first step of a launch nor after the last, when the run ends anyway.
        """
        is_exempt = self.step in (self._first_step, self._last_step)
        return self._stop.request(None if is_exempt else self._spec.train.exit_duration_in_mins)

    def _take_stop_signal(self, stop: signal.Signals | None) -> None:
        """Stop as the ranks have agreed in a step; after the last step the time limit has no meaning."""
        self._stop_signal = None if stop == signal.SIGALRM and self.step == self._last_step else stop

    def _sync_stop_signal(self, problem: RankError | None = None) -> None:
        """All-reduce stop signals and errors between steps; raises RunEnd on every rank if any has an error."""
        problem = problem or self._problem
        self._stop_signal = sync_stop_signal(self._stop_request, problem, self.step, self._mesh.device)

    def _one_step(self, step: TrainStep, batches: PrefetchingDataLoader) -> None:
        number, started = self.step + 1, time.perf_counter()
        self._record.heartbeat("step", number)
        if self._left_out.contains(number):
            self._leave_out(number, step)
            self._sync_stop_signal()
            return
        batch = batches.get(number, self._last_step)
        try:
            with self._profiler.record(number):
                limit = self._spec.train.exit_duration_in_mins
                result = step.run(number, batch, lambda: self._stop.request(limit), self._problem)
        except BadStep as bad:
            self._handle_bad_step(bad, number, step)
            return
        tokens = self._progress.tokens + result.tokens
        self._progress = replace(self._progress, step=number, tokens=tokens, updates=result.updates)
        self._loss = result.loss
        self._take_stop_signal(result.stop)
        seconds = time.perf_counter() - started
        self._record.step(
            number,
            result,
            self._progress.tokens,
            seconds,
            platform_of(self._mesh.device).max_memory_allocated(self._mesh.device),
            batch.data_time,
        )
        if result.expert_counts is not None:
            self._record.expert_load(number, self._state.model.config.expert_layers, result.expert_counts)
        if result.skipped:
            norm = result.grad_norm if math.isfinite(result.grad_norm) else None
            self._record.event("skipped_step", step=number, loss_scale=result.loss_scale, grad_norm=norm)
        self._zero_gradients.update(number, result, self._record)
        self._expert_collapse.update(number, result, self._record)
        self._stragglers.update(number, seconds, batch.data_time, self._record)
        self._write_profile(number)

    def _leave_out(self, number: int, step: TrainStep) -> None:
        """Count a step without reading its batch."""
        self._progress = replace(self._progress, step=number, updates=step.leave_out(number))
        self._record.left_out(number, self._progress.tokens)

    def _while_newest(self, change: Callable[[], None]) -> None:
        with self._record.fence.hold():
            change()

    def _handle_bad_step(self, bad: BadStep, number: int, step: TrainStep) -> None:
        """Leave the batch of a bad step out, and with "rewind" those before it. Raises RunEnd without budget left."""
        train, count = self._spec.train, self._left_out.num_bad_steps + 1
        if count > train.max_bad_steps:
            reason = f"{bad.reason}, after {train.max_bad_steps} bad steps (train.max_bad_steps)"
            raise RunEnd(ExitCode.NON_FINITE, reason, self.step, bad.details)
        target, first = None, number
        if train.bad_step_action == "rewind":
            self._saver.background.wait(self._progress)
            self._local.wait(self._progress)
            target = self._start.find(self.step, number - train.rewind_batches) or self._start.find(self.step)
        if target is not None:
            saved = checkpoint_step(target)
            assert saved is not None, "a checkpoint is named by its step"
            first = max(number - train.rewind_batches, saved) + 1
            remove = partial(remove_checkpoints_after, self._directory.checkpoints, saved)
            self._retry(partial(run_on_rank0, partial(self._while_newest, remove)))
        self._left_out.add(number, first, bad.reason)
        self._retry(self._left_out.save)
        self._record.event(
            "bad_step",
            step=number,
            reason=bad.reason,
            first=first,
            rewound_to=None if target is None else checkpoint_step(target),
            count=count,
            limit=train.max_bad_steps,
        )
        if target is None:
            self._leave_out(number, step)
        else:
            self._rewind(target, step)
        self._take_stop_signal(bad.stop)

    def _retry(self, work: Callable[[], None]) -> None:
        """Run collective work that writes in the run directory; wait for its storage if that fails."""
        retry_while_storage_fails(self._record, work, lambda: self._record.heartbeat(STORAGE, self.step))

    def _rewind(self, checkpoint: Path, step: TrainStep) -> None:
        """Go back to a checkpoint of this run."""
        self._progress = self._start.restore(checkpoint)
        self._restore_records()
        step.set_updates(self._progress.updates)
        self._zero_gradients = ZeroGradientGuard(self._spec.train.max_zero_grad_steps)
        self._expert_collapse = ExpertCollapseGuard(self._spec, self._state.model.config.expert_layers)
        self._record.phase("training", self.step)

    def _write_profile(self, step: int) -> None:
        try:
            written = self._profiler.write_after(step, self._last_step)
        except OSError as error:  # training continues without it
            self._record.event("note", message=f"the profile could not be written: {error}")
        else:
            if written is not None:
                self._record.event("note", message=f"profile: {written}")

    def _validate_if_due(self) -> None:
        """Validate and evaluate tasks if due; a resumed run repeats a validation that a stop interrupted."""
        if self._stop_signal is not None:
            return

        def may_continue(problem: RankError | None) -> bool:
            self._record.heartbeat("validating", self.step)
            self._sync_stop_signal(problem)
            return self._stop_signal is None

        last = self.step == self._spec.train.steps
        losses = self._validator.validate_if_due(self.step, last, may_continue)
        if losses is not None:
            self._validation = losses.get(VALIDATION_LOSS)
            self._count_validation(losses)
        if self._stop_signal is None:
            last = last or self._stopped_early
            self._validator.evaluate_tasks_if_due(self.step, last, may_continue)

    def _count_validation(self, losses: Mapping[str, float]) -> None:
        """Update the state of early stopping; log an event when it ends the run."""
        settings = self._spec.train.early_stopping
        state = count_validation(self._progress.early_stopping, settings, self.step, losses)
        self._progress = replace(self._progress, early_stopping=state)
        if state is not None and self._stopped_early:
            self._record.event(
                "early_stopping",
                step=self.step,
                metric=state.metric,
                best=state.best,
                best_step=state.best_step,
                validations=state.num_bad,
            )

    @property
    def _stopped_early(self) -> bool:
        return is_stopped(self._progress.early_stopping, self._spec.train.early_stopping)

    def _require_early_stopping_metric(self) -> None:
        """Raise a RunEnd on every rank if no validation data gives the loss that early stopping watches."""
        settings = self._spec.train.early_stopping
        if settings.patience is not None and settings.metric not in self._state.evaluated:
            there = ", ".join(self._state.evaluated) or "none: the run has no validation data"
            reason = f"train.early_stopping.metric={settings.metric} is no loss of this run (it has {there})"
            raise RunEnd(ExitCode.CONFIGURATION, reason, self.step)

    def _save_if_due(self) -> None:
        interval = self._spec.checkpoint.interval
        is_due, is_local_due = interval > 0 and self.step % interval == 0, self._local.is_due(self.step)
        if not (is_due or is_local_due) or self.step >= self._last_step or self._zero_gradients.is_exceeded:
            return
        if self._stop_signal is None:  # after a stop signal, `run` saves at its end
            self._weight_hashes.check_before_save(self.step)
            if is_local_due:
                self._local.save(self._progress, is_saved=is_due)
            if is_due:
                self._saver.save_async(self._progress)
                self._sync_stop_signal()

    def _run_end(self) -> RunEnd:
        details = {
            "loss": self._loss,
            "validation_loss": self._validation,
            "tokens": self._progress.tokens,
            "checkpoint": str(self._saver.saved) if self._saver.saved else None,
            **({"early_stopped": True} if self._stopped_early else {}),
        }
        stop = self._stop_signal
        if stop is None or stop == signal.SIGALRM:
            return RunEnd(ExitCode.DONE, self._done_reason(), self.step, details)
        return RunEnd(exit_code_of(stop), f"stopped by {stop.name} after step {self.step}", self.step, details)

    def _done_reason(self) -> str:
        steps, exit_at_step = self._spec.train.steps, self._spec.train.exit_at_step
        state = self._progress.early_stopping
        if state is not None and self._stopped_early:
            return stop_reason(state, self._spec.train.early_stopping, self.step, steps)
        if self.step > self._last_step:
            key = f"train.steps={steps}" if self._last_step == steps else f"train.exit_at_step={exit_at_step}"
            return f"nothing to do: the run is at step {self.step}, past {key}"
        if self.step == steps:
            return f"finished all {steps} steps"
        if self._stop_signal == signal.SIGALRM:
            limit = self._spec.train.exit_duration_in_mins
            return f"stopped after step {self.step} of {steps}, train.exit_duration_in_mins={limit:g} after the start"
        return f"stopped after step {self.step} of {steps} as asked"
