"""The order in which the engine's pipeline schedules run, and when each part runs, without processes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from megalaunch.engine.parallel.pipeline_schedule import make_schedule
from megalaunch.plan.stage_validation import V_SCHEDULES
from megalaunch.schema.parallel import Schedule

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}  # torch's names
_LENGTH = {FORWARD: 1, BACKWARD: 2, INPUT_GRAD: 1, WEIGHT_GRAD: 1}
"""Backward takes twice the time of forward: half for the gradient of its input, half for that of its weights."""


@dataclass(frozen=True)
class Part:
    """One part of a step: its kind, its stage and its microbatch."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Placed:
    """A part in time; the forward pass of a microbatch through all the stages of one rank takes 1."""

    part: Part
    start: Fraction
    length: Fraction


class _Stage:
    """What a schedule asks of a stage; records what it is told to run."""

    submod = torch.nn.Identity()
    device = torch.device("cpu")
    has_backward = True

    def __init__(self, index: int, stages: int, ranks: int, ran: list[Part]) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, index % ranks
        self.is_first, self.is_last, self._ran = index == 0, index == stages - 1, ran

    def skip_warmup(self) -> bool:
        return True

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> torch.Tensor:
        self._ran.append(Part(FORWARD, self.stage_index, microbatch))
        return torch.zeros(())

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self._ran.append(Part(BACKWARD, self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []  # nothing is prepared, sent or received


def run_order(name: Schedule, ranks: int, vpp: int, microbatches: int) -> list[list[Part]]:
    """Return what every rank runs in a step, in order, as the schedule of `make_schedule` has it."""
    orders = []
    for rank in range(ranks):
        ran: list[Part] = []
        schedule = _schedule(name, ranks, vpp, rank, microbatches, None, ran)
        if isinstance(schedule, PipelineScheduleMulti):  # runs what this table says
            actions = [action for action in schedule.pipeline_order[rank] if action is not None]
            parts = [part for action in actions for part in action.sub_actions or (action,)]  # overlapped: one's parts
            ran += [Part(_KINDS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in parts]
        else:
            rows = torch.zeros(microbatches, 1)
            schedule.step(rows, target=rows, losses=[], return_outputs=False)
        orders.append(ran)
    return orders


def count_gathers(schedule: Schedule, ranks: int, vpp: int, rank: int, microbatches: int, group: int | None) -> int:
    """Return how many times a rank's schedule all-gathers the weights of a virtual stage in a step."""
    actions = _schedule(schedule, ranks, vpp, rank, microbatches, group, []).pipeline_order_with_comms[rank]
    return sum(action.computation_type.name == "UNSHARD" for action in actions)


def _schedule(
    name: Schedule, ranks: int, vpp: int, rank: int, microbatches: int, group: int | None, ran: list[Part]
) -> Any:
    number = ranks * vpp
    own = [chunk * ranks + rank for chunk in range(vpp)]
    if name in V_SCHEDULES:
        own = [rank, number - 1 - rank]
    stages: list[Any] = [_Stage(index, number, ranks, ran) for index in own]
    return make_schedule(name, stages, microbatches, group, lambda output, _: output)


def place_in_time(orders: list[list[Part]], vpp: int) -> list[list[Placed]]:
    """Start every part as soon as its rank is free and what it needs has ended; sending takes no time."""
    last = max(part.stage for order in orders for part in order)
    ends: dict[Part, Fraction] = {}
    placed: list[list[Placed]] = [[] for _ in orders]
    while any(len(done) < len(order) for done, order in zip(placed, orders, strict=True)):
        before = len(ends)
        for done, order in zip(placed, orders, strict=True):
            while len(done) < len(order):
                part = order[len(done)]
                needs = _needs(part, last)
                if not all(any(one in ends for one in either) for either in needs):
                    break
                free = [done[-1].start + done[-1].length] if done else [Fraction(0)]
                start = max(free + [ends[one] for either in needs for one in either if one in ends])
                length = Fraction(_LENGTH[part.kind], vpp)
                done.append(Placed(part, start, length))
                ends[part] = start + length
        if len(ends) == before:
            raise ValueError("the ranks wait for each other")
    return placed


def idle_fraction(placed: list[list[Placed]]) -> Fraction:
    """Return the part of the step in which a rank computes nothing, as a mean over ranks: the pipeline bubble."""
    end = max(one.start + one.length for rank in placed for one in rank)
    busy = sum((one.length for rank in placed for one in rank), Fraction(0))
    return 1 - busy / (end * len(placed))


def _needs(part: Part, last: int) -> list[tuple[Part, ...]]:
    """Return what must have ended before a part: of each tuple, one."""

    def either(stage: int) -> tuple[Part, ...]:
        return tuple(Part(kind, stage, part.microbatch) for kind in (BACKWARD, INPUT_GRAD))

    if part.kind == FORWARD:
        return [(Part(FORWARD, part.stage - 1, part.microbatch),)] if part.stage else []
    if part.kind == WEIGHT_GRAD:
        return [either(part.stage)]
    own = (Part(FORWARD, part.stage, part.microbatch),)
    return [own] if part.stage == last else [own, either(part.stage + 1)]
