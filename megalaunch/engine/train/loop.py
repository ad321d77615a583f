"""From step k to the end: step, log, validate, save, and stop at a safe point."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.data.row import Rows
from megalaunch.data.validation_samples import FiniteRows
from megalaunch.engine.checkpoint.history import require_never_saved
from megalaunch.engine.checkpoint.initial import keep_origin, load_initial
from megalaunch.engine.checkpoint.publish import discard_leftovers
from megalaunch.engine.checkpoint.ranks import from_first_rank
from megalaunch.engine.checkpoint.store import newest_valid
from megalaunch.engine.checkpoint.twin import describe_reading
from megalaunch.engine.ending import Ending, Problem
from megalaunch.engine.measure.memory import peak_bytes
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.init import initialise
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.tied import renew_tied_head
from megalaunch.engine.process import StopRequest
from megalaunch.engine.train.agreement import agree_to_stop
from megalaunch.engine.train.batches import TrainBatches, batch_shape
from megalaunch.engine.train.evaluate import validation_loss
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.passes import Passes
from megalaunch.engine.train.record import Record
from megalaunch.engine.train.saver import Saver
from megalaunch.engine.train.saving import (
    Position,
    keep_tokenizer,
    restore_run,
    tokens_of_tokenizer,
    true_vocabulary,
)
from megalaunch.engine.train.step import Step
from megalaunch.engine.train.zero_gradient import ZeroGradients
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory


@dataclass(frozen=True)
class Trainee:
    """Everything a loop works on."""

    spec: RunSpec
    mesh: Mesh
    model: ModelParts
    passes: Passes
    optimizer: NamedAdamW
    training: Rows
    validation: FiniteRows | None


class Loop:
    """One worker's view of a run; every method is called on all ranks alike, and may raise an Ending on all alike."""

    def __init__(self, trainee: Trainee, directory: RunDirectory, record: Record, stop: StopRequest) -> None:
        self._trainee, self._directory, self._record, self._stop = trainee, directory, record, stop
        self._spec, self._mesh = trainee.spec, trainee.mesh
        self._shape = batch_shape(trainee.spec.batch.global_batch_size, trainee.mesh)
        self._position = Position(step=0, tokens=0)
        self._saver = Saver(trainee.spec, directory, trainee.model, trainee.optimizer, record)
        self._passed_over: list[str] = []  # checkpoints, each with what is wrong with it; known to rank 0
        self._zero_gradients = ZeroGradients(trainee.spec.train.max_zero_grad_steps)
        self._asked_to_stop: signal.Signals | None = None  # agreed upon by all ranks
        self._validated_step = 0
        self._validation: float | None = None
        self._loss: float | None = None

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._position.step

    def resume(self) -> None:
        """Continue from the newest valid checkpoint; drop the metrics that come after it.

        Begins anew only where none was ever saved: raises CheckpointError when all are damaged or gone.
        """
        self._record.phase("looking for checkpoints", 0)
        keep_tokenizer(self._directory, self._spec)
        found = newest_valid(
            self._directory.checkpoints, self._refused, partial(self._record.bytes_done, "checking checkpoints", 0)
        )
        if found is None:  # before anything is removed, cut or taken over
            from_first_rank(
                partial(require_never_saved, self._directory.checkpoints, self._passed_over, self._record.last_saved)
            )
        from_first_rank(partial(discard_leftovers, self._directory.checkpoints))
        if found is not None:
            self._saver.saved = found
            self._record.phase("loading")
            self._position = restore_run(found, self._spec.model, self._trainee.model, self._trainee.optimizer)
            renew_tied_head(self._trainee.model, self._mesh)
            self._record.event("resumed", step=self.step, checkpoint=str(found))
        else:
            self._begin()
        num_tokens = from_first_rank(partial(true_vocabulary, self._directory, self._spec))
        self._trainee.model.limit_vocabulary(num_tokens)
        self._record.cut_after(self.step)
        self._record.tell_gap(self.step)
        self._validated_step = from_first_rank(self._record.last_validation)

    def _begin(self) -> None:
        """A new run has its weights from their seed, unless it is to have them from elsewhere."""
        source = self._spec.checkpoint.initialize_from
        if source is None:
            initialise(self._trainee.model, self._spec.train.seed)
            renew_tied_head(self._trainee.model, self._mesh)
            return
        self._record.phase("loading")
        num_tokens = from_first_rank(partial(tokens_of_tokenizer, self._directory, self._spec))
        keep_origin(Path(source).expanduser(), self._directory, num_tokens)
        load_initial(Path(source).expanduser(), self._spec.model, self._trainee.model)
        renew_tied_head(self._trainee.model, self._mesh)
        self._record.event("note", message=f"begins with the weights of {source}")
        reading = from_first_rank(partial(describe_reading, Path(source).expanduser()))
        if reading is not None:
            self._record.event("note", message=reading)

    def run(self) -> Ending:
        """Train to `train.steps`, `train.stop_at` or a stop signal; returns how it ended (or raises an Ending)."""
        batches = TrainBatches(
            self._trainee.training,
            self._shape,
            self._mesh.device,
            waiting=lambda step: self._record.at("waiting for tokens", step),
        )
        step = Step(
            self._spec,
            self._mesh,
            self._trainee.model,
            self._trainee.passes,
            self._trainee.optimizer,
            self._trainee.training,
        )
        try:
            self._hear_signals()
            self._validate_if_due()
            self._record.phase("training", self.step)
            while self._asked_to_stop is None and self.step < self._last_step:
                self._one_step(step, batches)
                self._validate_if_due()
                self._save_if_due()
        except Ending as ending:
            self._saver.finish(ending.reason)
            raise
        finally:
            batches.close()
        if self._asked_to_stop is not None:
            self._record.event("stop_requested", signal=self._asked_to_stop.name)
        if self.step > 0:
            self._saver.save(self._position)
        self._record.phase("ending", self.step)
        return self._ending()

    @property
    def _last_step(self) -> int:
        return min(self._spec.train.steps, self._spec.train.stop_at or self._spec.train.steps)

    @property
    def _problem(self) -> Problem | None:
        """What this rank found wrong outside of steps."""
        return self._record.problem or self._saver.problem

    def _hear_signals(self, problem: Problem | None = None) -> None:
        """Between steps: agree whether any rank was asked to stop, or has a problem."""
        problem = problem or self._problem
        self._asked_to_stop = agree_to_stop(self._stop.signal, problem, self.step, self._mesh.device)

    def _one_step(self, step: Step, batches: TrainBatches) -> None:
        number, started = self.step + 1, time.perf_counter()
        self._record.at("step", number)
        batch = batches.of(number, self._last_step)
        result = step.run(number, batch, self._stop.signal, self._problem)
        self._position = Position(number, self._position.tokens + result.tokens)
        self._loss, self._asked_to_stop = result.loss, result.stop
        seconds = time.perf_counter() - started
        self._record.step(number, result, self._position.tokens, seconds, peak_bytes(self._mesh.device), batch.waited)
        self._zero_gradients.see(number, result, self._record)

    def _validate_if_due(self) -> None:
        """Validate after the current step if that is due and not on record: a resume makes up what a stop cut short."""
        rows, steps, interval = self._trainee.validation, self._spec.train.steps, self._spec.train.validation_interval
        due = self.step == steps or (interval > 0 and self.step > 0 and self.step % interval == 0)
        if not due or rows is None or self._asked_to_stop is not None or self.step == self._validated_step:
            return

        def may_go_on(problem: Problem | None) -> bool:
            self._record.at("validating", self.step)
            self._hear_signals(problem)
            return self._asked_to_stop is None

        self._record.phase("validating", self.step)
        loss = validation_loss(self._trainee.passes, rows, self._shape.micro_batch_size, self._mesh, may_go_on)
        if loss is not None:
            self._validation, self._validated_step = loss, self.step
            self._record.validation(self.step, loss)
        self._record.phase("training", self.step)

    def _save_if_due(self) -> None:
        interval = self._spec.checkpoint.interval
        due = interval > 0 and self.step % interval == 0 and self.step < self._last_step
        if self._zero_gradients.are_suspected:
            return
        if due and self._asked_to_stop is None:  # a run that stops saves at its end
            self._saver.save_beside(self._position)
            self._hear_signals()

    def _refused(self, path: Path, problems: list[str]) -> None:
        self._passed_over.append(f"{path.name}: {'; '.join(problems)}")
        self._record.event("checkpoint_refused", path=str(path), reason="; ".join(problems))

    def _ending(self) -> Ending:
        details = {
            "loss": self._loss,
            "validation_loss": self._validation,
            "tokens": self._position.tokens,
            "checkpoint": str(self._saver.saved) if self._saver.saved else None,
        }
        stop = self._asked_to_stop
        if stop is None:
            return Ending(ExitCode.DONE, self._done_reason(), self.step, details)
        code = ExitCode.INTERRUPTED if stop == signal.SIGINT else ExitCode.PREEMPTED
        return Ending(code, f"stopped by {stop.name} after step {self.step}", self.step, details)

    def _done_reason(self) -> str:
        steps, stop_at = self._spec.train.steps, self._spec.train.stop_at
        if self.step > self._last_step:
            key = f"train.steps={steps}" if self._last_step == steps else f"train.stop_at={stop_at}"
            return f"nothing to do: the run is at step {self.step}, past {key}"
        if self.step == steps:
            return f"finished all {steps} steps"
        return f"stopped after step {self.step} of {steps} as asked"
