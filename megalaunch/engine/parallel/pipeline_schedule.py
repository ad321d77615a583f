"""Pipeline schedules: those of torch, with the changes that this engine needs.

The classes override private methods of `torch.distributed.pipelining`, which has no public hooks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _get_1f1b_rank_ops,
)

from megalaunch.engine.model.moe.load import forget_load
from megalaunch.engine.parallel.float8 import keep_histories
from megalaunch.engine.parallel.pipeline_stage import ObservedStage
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.schema.parallel import Schedule

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti

# GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021. Zero bubble and ZBV: Qi et al. 2024.
# DualPipeV: after DeepSeek's DualPipe (DeepSeek-AI 2024).
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


def make_schedule(
    name: Schedule,
    stages: Sequence[PipelineStage],
    microbatches: int,
    group: int | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    observer: StepObserver = NO_OBSERVER,
) -> PipelineSchedule:
    """Build the pipeline schedule of one rank.

    Args:
        name: `parallel.schedule`; plan/resolve.py has replaced "auto".
        stages: The stages of this rank, in the order of a microbatch's forward pass.
        microbatches: Their number in a step.
        group: Microbatches of a group of interleaved 1F1B; None: torch's own groups, or another schedule.
        loss: Takes the last stage's output and the labels of a microbatch; returns its loss, ready for backward.
        observer: Gets the first step's shape inference as the phase "preparing".
    """
    # The loss is already divided by the global token count: scale_grads=False keeps the schedule from dividing the
    # gradients by the number of microbatches as well.
    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name in _SINGLE_STAGE_SCHEDULES:
        (stage,) = stages
        return _observed(_SINGLE_STAGE_SCHEDULES[name], observer)(stage, microbatches, **settings)
    if group is not None:
        return _observed(GroupedInterleaved1F1B, observer)(list(stages), microbatches, group=group, **settings)
    return _observed(_MULTI_STAGE_SCHEDULES[name], observer)(list(stages), microbatches, **settings)


def _observed(schedule: type[PipelineSchedule], observer: StepObserver) -> Callable[..., PipelineSchedule]:
    """Return a subclass of the schedule that reports its shape inference, and forgets what layers noted in it.

    Its stages need no neighbours where they know the shapes that they exchange.
    """

    class Observed(schedule):  # type: ignore[misc, valid-type]
        def _warmup_p2p(self, stages: list[ObservedStage], *args: Any) -> None:  # called by torch 2.13 and 2.14
            if not all(stage.skip_warmup() for stage in stages):
                super()._warmup_p2p(stages, *args)

        def _initialize_pipeline_distributed_state(self, stages: list[ObservedStage], *args: Any) -> None:  # by 2.15
            if not all(stage.skip_warmup() for stage in stages):
                super()._initialize_pipeline_distributed_state(stages, *args)

        def _initialize_pp_stages(self, stages: list[PipelineStage], *args: Any, **kwargs: Any) -> Any:
            with observer.phase_scope("preparing"), keep_histories(stage.submod for stage in stages):
                initialized = super()._initialize_pp_stages(stages, *args, **kwargs)
            for stage in stages:
                forget_load(stage.submod)
            return initialized

    return Observed


class GroupedInterleaved1F1B(ScheduleInterleaved1F1B):
    """Interleaved 1F1B: a rank runs `group` microbatches of one of its stages before those of its next stage.

    `group` is Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`; the last group may be smaller. Larger
    groups lengthen the warm-up and leave more time for a stage's send/recv and all-gather of weights to overlap.
    The groups of torch's own schedule have about pp microbatches.
    """

    def __init__(self, stages: list[Any], microbatches: int, group: int, **settings: Any) -> None:
        self._group = min(group, microbatches)
        super().__init__(stages, microbatches, **settings)

    @property
    def number_of_rounds(self) -> int:
        """1: one round of all microbatches, as torch's rounds would have to be of equal size."""
        return 1

    @number_of_rounds.setter
    def number_of_rounds(self, number: int) -> None:
        """Ignore the number that torch's constructor sets."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """Return the actions of one rank: warm-up forwards, then 1F1B, then backwards (Narayanan et al. 2021).

        The warm-up has (v - 1) group + 2 (pp - 1 - rank) forwards, with v stages a rank.
        """
        chunks, ranks, number = self.n_local_stages, self.pp_group_size, self._n_microbatches
        order = [chunk for size in self._sizes() for chunk in range(chunks) for _ in range(size)]
        total = chunks * number
        warm = min((chunks - 1) * self._group + 2 * (ranks - 1 - rank), total)

        def forward(step: int) -> int:
            return order[step] * ranks + rank

        def backward(step: int) -> int:
            return (chunks - 1 - order[step - warm]) * ranks + rank

        ran: list[_Action | None] = _get_1f1b_rank_ops(  # type: ignore[no-untyped-call]
            chunks, ranks, warm, total - warm, warm, rank, forward, backward
        )
        return ran

    def _sizes(self) -> list[int]:
        full, rest = divmod(self._n_microbatches, self._group)
        return [self._group] * full + ([rest] if rest else [])
