"""Pipeline parallelism: each rank holds a stage of the decoder, and a schedule of torch's moves the microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from megalaunch.config.schema.parallel import Schedule
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.plan.stages import Stage

PipelineLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels of a microbatch -> its summed loss."""

_SCHEDULES: Mapping[Schedule, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def keep_stage(model: Decoder, stage: Stage) -> None:
    """Leave of a decoder on meta what one stage computes; names stay the same."""
    for index in range(model.config.num_layers):
        if index not in stage.layers:
            del model.layers[str(index)]
    if not stage.embedding:
        model.embedding = None
    if not stage.head:
        model.norm = model.head = None


class Pipeline:
    """This rank's stage, and the schedule of a number of microbatches."""

    def __init__(self, model: Decoder, mesh: Mesh, schedule: Schedule, loss: PipelineLoss) -> None:
        self.model, self._mesh, self._loss = model, mesh, loss
        self._kind = _SCHEDULES[schedule]
        self._divisor = 1
        self._training: tuple[int, PipelineScheduleSingle] | None = None
        self._evaluating: PipelineScheduleSingle | None = None

    def train(self, inputs: Mapping[str, Tensor], labels: Tensor, microbatches: int, divisor: int) -> list[Tensor]:
        """Forward and backward of all microbatches; each one's loss / divisor on the last stage, else nothing.

        `inputs` and `labels` hold them one after the other along dim 0; `inputs` has the key `tokens`.
        """
        if self._training is None or self._training[0] != microbatches:
            self._training = microbatches, self._schedule(self._kind, microbatches)
        self._divisor = divisor
        return self._run(self._training[1].step, inputs, labels)

    def evaluate(self, inputs: Mapping[str, Tensor], labels: Tensor) -> list[Tensor]:
        """The summed loss of one microbatch on the last stage, else nothing; forward only."""
        if self._evaluating is None:
            self._evaluating = self._schedule(ScheduleGPipe, 1)
        self._divisor = 1
        return self._run(self._evaluating.eval, inputs, labels)

    def _run(self, step: Callable[..., Any], inputs: Mapping[str, Tensor], labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        rest = {name: value for name, value in inputs.items() if name != "tokens"}
        first = (inputs["tokens"],) if self._mesh.pp.rank == 0 else ()
        last = {"target": labels, "losses": losses} if self._mesh.pp.rank == self._mesh.pp.size - 1 else {}
        step(*first, **last, **rest)
        return [loss.detach() for loss in losses]

    def _schedule(self, kind: type[PipelineScheduleSingle], microbatches: int) -> PipelineScheduleSingle:
        axis = self._mesh.pp
        stage = PipelineStage(
            self.model, axis.rank, axis.size, self._mesh.device, group=self._mesh.grid.get_group("pp")
        )
        # The loss is divided by the global token count; the schedule must not divide by microbatches as well.
        return kind(stage, microbatches, loss_fn=self._divided_loss, scale_grads=False)

    def _divided_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._loss(logits, labels) / torch.tensor(self._divisor, device=logits.device)
