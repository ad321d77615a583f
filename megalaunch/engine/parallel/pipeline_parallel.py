"""Pipeline parallelism: each rank holds stages of the decoder; a pipeline schedule of torch runs the microbatches.

With stages f_0 ... f_{n-1} and the input x_0 of a microbatch

Forward:   recv x_k from the rank of stage k - 1;  x_{k+1} = f_k(x_k);  send x_{k+1} to the rank of stage k + 1
Backward:  recv dx_{k+1} from the rank of stage k + 1;  dx_k, dW_k = backward of f_k;  send dx_k to that of stage k - 1

The pipeline schedule orders these actions of all microbatches on a rank. Zero-bubble schedules compute dx_k and dW_k in
two backward passes, so that dW_k fills the time in which a rank would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.fsdp import ZERO_STAGES
from megalaunch.engine.parallel.pipeline_schedule import PipelineSchedule, make_schedule
from megalaunch.engine.parallel.pipeline_sharding import ShardedStage
from megalaunch.engine.parallel.pipeline_stage import STAGE, StageActivations
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.plan.stages import Stage
from megalaunch.schema.parallel import ParallelSpec

PipelineLoss = Callable[[Tensor, Tensor, Sequence[float]], tuple[Tensor, Tensor]]
"""Takes the last stage's output and the labels of a microbatch, and the numbers of tokens that divide the loss and its
parts; returns the loss, and its parts without a gradient."""


def prune_to_stage(model: Decoder, stage: Stage) -> None:
    """Remove from a decoder on meta the modules that a stage does not compute, in place; names stay the same."""
    for index in range(model.config.num_layers):
        if index not in stage.layers:
            del model.layers[str(index)]
    for depth in range(len(model.config.mtp_layers)):
        if depth not in stage.mtp:
            del model.mtp[str(depth)]
    model.embeds_input = stage.embedding
    if not stage.embedding and not stage.mtp:
        model.embedding = None
    if not (stage.mtp if model.config.mtp_layers else stage.head):  # MTP depths read what the norm returns
        model.norm = None
    if not stage.head:
        model.head = None


class Pipeline:
    """This rank's pipeline stages and their schedule, which is built for a number of microbatches and reused.

    Args:
        model: The stages of this rank.
        mesh: The device mesh.
        stages: All stages of the pipeline.
        parallel: The pipeline schedule, and the group size of interleaved 1F1B.
        loss: The loss of the last stage.
        observer: Gets the phases of a step.
        activations: What each stage sends to the next one; None: inferred in the first step.
    """

    def __init__(
        self,
        model: ModelParts,
        mesh: Mesh,
        stages: Sequence[Stage],
        parallel: ParallelSpec,
        loss: PipelineLoss,
        observer: StepObserver = NO_OBSERVER,
        activations: Sequence[StageActivations] | None = None,
    ) -> None:
        self._mesh, self._schedule_name, self._loss = mesh, parallel.schedule, loss
        self._group = parallel.microbatch_group_size_per_vp_stage if parallel.schedule == "interleaved" else None
        numbers = [number for number, stage in enumerate(stages) if stage.rank == mesh.pp.rank]
        sharded = ZERO_STAGES[parallel.data_sharding].sync_every_microbatch
        parts: list[nn.Module] = [ShardedStage(part, parallel) if sharded else part for part in model.parts]
        self._parts = dict(zip(numbers, parts, strict=True))
        self._number_of_stages = len(stages)
        self._observer, self._activations = observer, activations
        self._total_tokens: Sequence[float] = (1,)
        self._losses: list[Tensor] = []
        self._prepared: tuple[int, PipelineSchedule] | None = None

    def train(
        self, inputs: Mapping[str, Tensor | bool], labels: Tensor, microbatches: int, total_tokens: Sequence[float]
    ) -> list[Tensor]:
        """Run forward and backward of all microbatches of a step.

        Args:
            inputs: arguments of the stages, with the key `tokens`. Tensors hold the microbatches concatenated along
                dim 0; other values are the same for all microbatches.
            labels: labels of the microbatches, concatenated in the same way.
            microbatches: their number.
            total_tokens: the global token counts, which divide each part of the loss before backward.

        Returns:
            the parts of the loss of each microbatch on the rank of the last stage, else an empty list.
        """
        if self._prepared is None or self._prepared[0] != microbatches:
            self._prepared = microbatches, self._schedule(microbatches)
        self._total_tokens, self._losses = total_tokens, []
        rest: dict[str, Any] = {name: value for name, value in inputs.items() if name != "tokens"}
        if self._number_of_stages - 1 in self._parts:
            rest["target"] = labels
        first = (inputs["tokens"],) if 0 in self._parts else ()
        self._prepared[1].step(*first, return_outputs=False, **rest)
        return self._losses[-microbatches:]  # torch's shape inference, in the first step, calls the loss too

    def _schedule(self, microbatches: int) -> PipelineSchedule:
        device, group = self._mesh.device, self._mesh.pp_group
        stages = [
            STAGE(part, number, self._number_of_stages, device, group, self._observer, self._activations)
            for number, part in self._parts.items()
        ]
        return make_schedule(self._schedule_name, stages, microbatches, self._group, self._local_loss, self._observer)

    def _local_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        loss, parts = self._loss(output, labels, self._total_tokens)
        self._losses.append(parts)
        return loss
