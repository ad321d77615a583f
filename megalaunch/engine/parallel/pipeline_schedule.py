"""Pipeline stages and pipeline schedules: those of torch, with the changes that this engine needs.

The classes override private methods of `torch.distributed.pipelining`, which has no public hooks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _get_1f1b_rank_ops,
)
from torch.distributed.pipelining.stage import _RecvInfo

from megalaunch.engine.model.moe.load import forget_load
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, Phase, StepObserver
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
        name: `parallel.schedule`.
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
    """Return a subclass of the schedule that reports its shape inference, and forgets what routers counted in it."""

    class Observed(schedule):  # type: ignore[misc, valid-type]
        def _initialize_pp_stages(self, stages: list[PipelineStage], *args: Any, **kwargs: Any) -> Any:
            with observer.phase_scope("preparing"):
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


@dataclass(frozen=True)
class StageActivations:
    """Shape [B, s, H] and dtype of the activations that a stage sends to the next one."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ObservedStage(PipelineStage):
    """Pipeline stage that reports its phases, and need not ask its neighbours for the shape of activations.

    Args:
        part: The stage's part of the decoder.
        number: Number of the stage.
        stages: Number of stages of the pipeline.
        device: Device of the stage.
        group: Process group of the pp axis.
        observer: Gets the phases of backward passes, sends and receives.
        activations: What each stage sends to the next one; None: ask the neighbours in the first step. A simulated
            rank has no neighbours to ask.
    """

    def __init__(
        self,
        part: nn.Module,
        number: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        observer: StepObserver = NO_OBSERVER,
        activations: Sequence[StageActivations] | None = None,
    ) -> None:
        super().__init__(part, number, stages, device, group=group)
        self._observer, self._activations = observer, activations

    def _recv_meta(self, src_stage: int) -> Any:
        if self._activations is None:
            return super()._recv_meta(src_stage)
        sent, forward = self._activations[min(src_stage, self.stage_index)], src_stage < self.stage_index
        shape = torch.Size(sent.shape)
        stride = torch.empty(shape, device="meta").stride()
        meta = _TensorMeta(shape=shape, stride=stride, dtype=sent.dtype, requires_grad=forward)
        return _StageForwardMeta((meta,)) if forward else _StageBackwardMeta((meta,))

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        if self._activations is None:
            super()._send_meta(meta, dst_stage)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of activations."""
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), "forward")

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of activations."""
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), "forward")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of gradients."""
        return self._tagged(super().get_bwd_recv_ops(bwd_chunk_id), "backward")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of gradients."""
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), "backward")

    def _tagged(self, operations: list[dist.P2POp], phase: Phase) -> list[dist.P2POp]:
        self._observer.tag_p2p(operations, phase)
        return operations

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run torch's backward, then detach the loss in place.

        The schedule holds all losses: undetached, each would hold its graph and with it the input of the stage.
        """
        with self._observer.phase_scope("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run torch's backward for the gradients of weights, the second half of a zero-bubble schedule's backward."""
        with self._observer.phase_scope("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the stage's gradients over data-parallel ranks, after its last backward pass."""
        with self._observer.phase_scope("backward"):
            super().perform_reduce_grad(grad_scale_factor)


class LazyRecvStage(ObservedStage):
    """Pipeline stage with lazily allocated receive buffers of activations and gradients.

    Before 2.15 torch's `PipelineStage` allocates buffers for all microbatches at once and holds them: with 200
    microbatches they take more memory than everything else. Here a buffer is allocated when its recv is posted, and the
    stage drops its reference when the received tensor is read.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self._for_each_microbatch(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self._for_each_microbatch(self.grad_recv_info, num_microbatches)

    def _for_each_microbatch(self, infos: dict[int, tuple[Any, ...]], number: int) -> None:
        _free_buffers(infos[0])
        for microbatch in range(1, number):
            infos[microbatch] = tuple(copy(info) for info in infos[0])

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[Any]:
        for info in recv_infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _free_buffers(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _free_buffers(self.grad_recv_info[bwd_chunk_id])
        return found


def _free_buffers(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None


# torch 2.15 allocates receive buffers when a recv is posted, and hands them to the stage that reads them.
STAGE = ObservedStage if hasattr(_RecvInfo, "allocate_buffer") else LazyRecvStage
"""The class of this engine's pipeline stages with the installed torch."""
