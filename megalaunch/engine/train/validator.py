"""The validations of a run: its own validation data and the named sets, and tasks of lm-eval, when they are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.evaluate import validation_loss
from megalaunch.engine.train.forward_backward import ForwardBackward
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.rundir.metrics import is_task_evaluation, is_validation
from megalaunch.schema import RunSpec

MayContinue = Callable[[RankError | None], bool]
"""Called between batches with this rank's error, if any; the same answer on all ranks. False ends the evaluation."""

TaskEvaluator = Callable[[MayContinue], Mapping[str, float] | None]
"""Evaluates tasks and returns their scores by key of metrics.jsonl, the same on all ranks; None if interrupted."""


@dataclass
class Validator:
    """Runs what is due after a step, once. Every method is collective.

    Args:
        spec: The run spec.
        mesh: The device mesh.
        forward_backward: The passes of the model.
        datasets: Validation data by key of metrics.jsonl (rundir/metrics.py).
        batch_size: Rows of a batch on one data-parallel rank.
        record: The log.
        tasks: Evaluates the tasks of `train.eval_tasks`; None without tasks.
    """

    spec: RunSpec
    mesh: Mesh
    forward_backward: ForwardBackward
    datasets: Mapping[str, FiniteDataset]
    batch_size: int
    record: RunLogger
    tasks: TaskEvaluator | None = None
    _validated_step: int = field(default=0, init=False)
    _tasks_step: int = field(default=0, init=False)

    def resume(self) -> None:
        """Read from the metrics which steps were evaluated: what a stop interrupted is repeated."""
        self._validated_step = run_on_rank0(lambda: self.record.last_step_of(is_validation))
        self._tasks_step = run_on_rank0(lambda: self.record.last_step_of(is_task_evaluation))

    def validate_if_due(self, step: int, last: bool, may_continue: MayContinue) -> Mapping[str, float] | None:
        """Return the losses after a step by key; None if none are due, or the validation was interrupted.

        Args:
            step: The last finished step.
            last: It is the last step of the run.
            may_continue: See `MayContinue`.
        """
        due = _is_due(step, last, self.spec.train.validation_interval)
        if not due or not self.datasets or step == self._validated_step:
            return None
        self.record.phase("validating", step)
        losses: dict[str, float] = {}
        for key, dataset in self.datasets.items():
            heartbeat = partial(self.record.heartbeat, "validating", step)
            loss = validation_loss(self.forward_backward, dataset, self.batch_size, self.mesh, may_continue, heartbeat)
            if loss is None:
                break
            losses[key] = loss
        is_complete = len(losses) == len(self.datasets)
        if is_complete:
            losses = run_on_rank0(lambda: losses)  # decisions that follow from them are the same on all ranks
            self._validated_step = step
            self.record.evaluation(step, losses)
        self.record.phase("training", step)
        return losses if is_complete else None

    def evaluate_tasks_if_due(self, step: int, last: bool, may_continue: MayContinue) -> None:
        """Evaluate the tasks after a step if they are due, and log their scores."""
        due = _is_due(step, last, self.spec.train.eval_tasks.interval)
        if not due or self.tasks is None or step == self._tasks_step:
            return
        self.record.phase("evaluating tasks", step)
        scores = self.tasks(may_continue)
        if scores is not None:
            self._tasks_step = step
            self.record.evaluation(step, scores)
        self.record.phase("training", step)


def _is_due(step: int, last: bool, interval: int) -> bool:
    return last or (interval > 0 and step > 0 and step % interval == 0)
