"""From step k to the end: step, log, validate, save, and stop at a safe point."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.data.gpt_samples import GPTSamples
from megalaunch.data.validation_samples import ValidationSamples
from megalaunch.engine.checkpoint.store import newest_valid, remove_old
from megalaunch.engine.ending import Ending
from megalaunch.engine.measure.memory import peak_bytes
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.process import StopRequest
from megalaunch.engine.train.agreement import gather_objects
from megalaunch.engine.train.batches import TrainBatches, batch_shape
from megalaunch.engine.train.evaluate import validation_loss
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.record import Record
from megalaunch.engine.train.saving import Position, restore_run, save_run
from megalaunch.engine.train.step import Step
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory


@dataclass(frozen=True)
class Trainee:
    """Everything a loop works on."""

    spec: RunSpec
    mesh: Mesh
    model: Decoder
    optimizer: NamedAdamW
    training: GPTSamples
    validation: ValidationSamples | None


class Loop:
    """One worker's view of a run; every method is called on all ranks alike."""

    def __init__(self, trainee: Trainee, directory: RunDirectory, record: Record, stop: StopRequest) -> None:
        self._trainee, self._directory, self._record, self._stop = trainee, directory, record, stop
        self._spec, self._mesh = trainee.spec, trainee.mesh
        self._shape = batch_shape(trainee.spec.batch.global_batch_size, trainee.mesh)
        self._position = Position(step=0, tokens=0)
        self._saved: Path | None = None
        self._validation: float | None = None
        self._loss: float | None = None

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, if there is one; drop the metrics that come after it."""
        self._record.phase("looking for checkpoints", 0)
        self._saved = newest_valid(self._directory.checkpoints, self._refused)
        if self._saved is not None:
            self._record.phase("loading")
            self._position = restore_run(self._saved, self._trainee.model, self._trainee.optimizer)
            self._record.event("resumed", step=self._position.step, checkpoint=str(self._saved))
        self._record.cut_after(self._position.step)

    def run(self) -> Ending:
        """Train to `train.steps`, `train.stop_at` or a stop signal; returns how it ended (or raises an Ending)."""
        batches = TrainBatches(self._trainee.training, self._shape, self._mesh.device)
        step = Step(self._spec, self._mesh, self._trainee.model, self._trainee.optimizer, self._trainee.training)
        try:
            self._validate_if_due()
            self._record.phase("training", self._position.step)
            while self._position.step < self._last_step:
                stop = self._one_step(step, batches)
                if stop is not None:
                    return self._stopped(stop)
        finally:
            batches.close()
        return self._finished()

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._position.step

    @property
    def _last_step(self) -> int:
        return min(self._spec.train.steps, self._spec.train.stop_at or self._spec.train.steps)

    def _one_step(self, step: Step, batches: TrainBatches) -> signal.Signals | None:
        number, started = self._position.step + 1, time.perf_counter()
        self._record.at("step", number)
        result = step.run(number, batches.of(number), self._stop.signal)
        self._position = Position(number, self._position.tokens + result.tokens)
        self._loss = result.loss
        seconds = time.perf_counter() - started
        self._record.step(number, result, self._position.tokens, seconds, peak_bytes(self._mesh.device))
        stop = result.stop if result.stop is not None else self._validate_if_due()
        if stop is None and self._save_due(number):
            self._save()
        return stop

    def _validate_if_due(self) -> signal.Signals | None:
        """Validate after the current step if it is due and not on record; a stop signal cuts it short."""
        number, interval = self._position.step, self._spec.train.validation_interval
        due = number == self._spec.train.steps or (interval > 0 and number > 0 and number % interval == 0)
        on_record = gather_objects(self._record.is_first and self._record.has_validation(number))[0] if due else True
        if self._trainee.validation is None or on_record:
            return None
        self._record.phase("validating", number)
        loss = validation_loss(
            self._trainee.model,
            self._trainee.validation,
            self._shape.micro_batch_size,
            self._mesh,
            lambda: self._stop.signal,
        )
        if isinstance(loss, signal.Signals):
            return loss
        self._validation = loss
        self._record.validation(number, loss)
        self._record.phase("training", number)
        return None

    def _save_due(self, step: int) -> bool:
        interval = self._spec.checkpoint.interval
        return interval > 0 and step % interval == 0 and step < self._last_step

    def _save(self) -> None:
        if self._saved == self._directory.checkpoint(self._position.step):
            return
        started = time.perf_counter()
        self._record.phase("saving", self._position.step)
        trainee = self._trainee
        self._saved = save_run(self._directory, self._spec, trainee.model, trainee.optimizer, self._position)
        if self._record.is_first:
            remove_old(self._directory.checkpoints, self._spec.checkpoint.keep_last, known_valid=self._saved)
        self._record.event(
            "checkpoint", step=self._position.step, path=str(self._saved), seconds=time.perf_counter() - started
        )

    def _refused(self, path: Path, problems: list[str]) -> None:
        self._record.event("checkpoint_refused", path=str(path), reason="; ".join(problems))

    def _details(self) -> dict[str, object]:
        return {
            "loss": self._loss,
            "validation_loss": self._validation,
            "tokens": self._position.tokens,
            "checkpoint": str(self._saved) if self._saved else None,
        }

    def _stopped(self, received: signal.Signals) -> Ending:
        self._record.event("stop_requested", signal=received.name)
        self._save()
        code = ExitCode.INTERRUPTED if received == signal.SIGINT else ExitCode.PREEMPTED
        step = self._position.step
        return Ending(code, f"stopped by {received.name} after step {step}", step, self._details())

    def _finished(self) -> Ending:
        self._save()
        step, steps = self._position.step, self._spec.train.steps
        reason = f"finished all {steps} steps" if step >= steps else f"stopped after step {step} of {steps} as asked"
        return Ending(ExitCode.DONE, reason, step, self._details())
