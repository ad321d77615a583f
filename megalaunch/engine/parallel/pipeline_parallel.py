"""Pipeline parallelism: each rank holds stages of the decoder; a pipeline schedule of torch runs the microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megalaunch.config.schema.parallel import ParallelSpec, Schedule
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.interleaved_1f1b import GroupedInterleaved1F1B
from megalaunch.engine.parallel.pipeline_stage import LazyRecvStage
from megalaunch.plan.stages import Stage

PipelineLoss = Callable[[Tensor, Tensor], Tensor]
"""The last stage's output and labels of a microbatch -> its summed loss."""

_SINGLE_STAGE_SCHEDULES: Mapping[Schedule, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}
_MULTI_STAGE_SCHEDULES: Mapping[Schedule, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def prune_to_stage(model: Decoder, stage: Stage) -> None:
    """Leave of a decoder on meta what one stage computes; names stay the same."""
    for index in range(model.config.num_layers):
        if index not in stage.layers:
            del model.layers[str(index)]
    if not stage.embedding:
        model.embedding = None
    if not stage.head:
        model.norm = model.head = None


class Pipeline:
    """This rank's stages, and the schedule of a number of microbatches."""

    def __init__(
        self, model: ModelParts, mesh: Mesh, stages: Sequence[Stage], parallel: ParallelSpec, loss: PipelineLoss
    ) -> None:
        self._mesh, self._schedule_name, self._loss = mesh, parallel.schedule, loss
        self._group = parallel.microbatch_group_size_per_vp_stage if parallel.schedule == "interleaved" else None
        numbers = [number for number, stage in enumerate(stages) if stage.rank == mesh.pp.rank]
        self._parts = dict(zip(numbers, model.parts, strict=True))
        self._number_of_stages = len(stages)
        self._divisor = 1
        self._prepared: tuple[int, PipelineScheduleSingle | PipelineScheduleMulti] | None = None

    def train(
        self, inputs: Mapping[str, Tensor | bool], labels: Tensor, microbatches: int, divisor: int
    ) -> list[Tensor]:
        """Forward and backward of all microbatches; each one's loss / divisor on the last stage, else nothing.

        `inputs` and `labels` hold them one after the other along dim 0; `inputs` has the key `tokens`, and what is no
        tensor is the same for all.
        """
        if self._prepared is None or self._prepared[0] != microbatches:
            self._prepared = microbatches, self._schedule(microbatches)
        self._divisor = divisor
        losses: list[Tensor] = []
        rest: dict[str, Any] = {name: value for name, value in inputs.items() if name != "tokens"}
        if self._number_of_stages - 1 in self._parts:
            rest |= {"target": labels, "losses": losses}
        first = (inputs["tokens"],) if 0 in self._parts else ()
        self._prepared[1].step(*first, return_outputs=False, **rest)
        return [loss.detach() for loss in losses]

    def _schedule(self, microbatches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        group = self._mesh.pp_group
        stages = [
            LazyRecvStage(part, number, self._number_of_stages, self._mesh.device, group=group)
            for number, part in self._parts.items()
        ]
        # The loss is divided by the global token count; the schedule must not divide by microbatches as well.
        if self._schedule_name in _SINGLE_STAGE_SCHEDULES:
            (stage,) = stages
            kind = _SINGLE_STAGE_SCHEDULES[self._schedule_name]
            return kind(stage, microbatches, loss_fn=self._local_loss, scale_grads=False)
        if self._group is not None:
            settings: dict[str, Any] = {"loss_fn": self._local_loss, "scale_grads": False}
            return GroupedInterleaved1F1B(list(stages), microbatches, self._group, **settings)
        several = _MULTI_STAGE_SCHEDULES[self._schedule_name]
        return several(list(stages), microbatches, loss_fn=self._local_loss, scale_grads=False)

    def _local_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return self._loss(output, labels) / torch.tensor(self._divisor, device=output.device)
