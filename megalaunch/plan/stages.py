"""The layers of each pipeline stage, in the order in which a microbatch passes through them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megalaunch.plan.pipeline_layout import PipelineLayoutError, expand_layout
from megalaunch.plan.stage_validation import PipelineSplit, StageViolation, find_stage_violations
from megalaunch.schema import RunSpec

MAX_LAYERS = 100_000  # more than any model has, and still few enough to list


@dataclass(frozen=True)
class Stage:
    """One stage: `layers` are indices of decoder layers, `mtp` of MTP depths (from 0).

    `rank` is its pp rank, `chunk` its index on that rank.
    """

    rank: int
    chunk: int
    layers: tuple[int, ...]
    mtp: tuple[int, ...]
    embedding: bool
    head: bool


class StageError(ValueError):
    """The split is invalid; `violations` lists every violation."""

    def __init__(self, violations: tuple[StageViolation, ...]) -> None:
        self.violations = violations
        super().__init__("; ".join(violation.message for violation in violations))


def build_stages(spec: RunSpec) -> tuple[Stage, ...]:
    """Return the stages in the order in which a microbatch passes through them; raises StageError.

    Stage s is chunk s // pp of pp rank s % pp; for zbv and dualpipev the second chunks are in reverse rank order.
    """
    return assign_layers(PipelineSplit.from_spec(spec))


def virtual_stages(spec: RunSpec) -> int:
    """Return the stages of one pipeline rank: `parallel.vpp`, or by the layout; 1 if unknown."""
    p = spec.parallel
    if p.pipeline_layout is None:
        return p.vpp or 1
    try:
        stages = expand_layout(p.pipeline_layout)
    except PipelineLayoutError:
        return p.vpp or 1
    return max(1, len(stages) // p.pp)


@lru_cache(maxsize=4096)
def assign_layers(split: PipelineSplit) -> tuple[Stage, ...]:
    """Assign every layer of a split to its stage; raises StageError."""
    violations = find_stage_violations(split)
    if not violations and split.num_counted_layers > MAX_LAYERS:
        message = f"{split.num_counted_layers} layers are more than the {MAX_LAYERS} that can be listed"
        violations = (StageViolation("model.num_layers", "model.num_layers", message, {"num_layers": split.layers}),)
    if violations:
        raise StageError(violations)
    counts, depths = _layers_and_depths(split)
    stages, next_layer, next_depth = [], 0, 0
    chunks = len(counts) // split.pp
    for number, (count, depth) in enumerate(zip(counts, depths, strict=True)):
        stages.append(
            Stage(
                rank=split.pipeline_rank(number, chunks),
                chunk=number // split.pp,
                layers=tuple(range(next_layer, next_layer + count)),
                mtp=tuple(range(next_depth, next_depth + depth)),
                embedding=number == 0,
                head=number == len(counts) - 1,
            )
        )
        next_layer, next_depth = next_layer + count, next_depth + depth
    return tuple(stages)


def _layers_and_depths(split: PipelineSplit) -> tuple[list[int], list[int]]:
    """Return the decoder layers and MTP depths of every stage of a valid split."""
    if split.layout is not None:
        stages = expand_layout(split.layout)
        return [stage.count("t") for stage in stages], [stage.count("m") for stage in stages]
    vpp = split.vpp or 1
    number = split.pp * vpp
    if split.first is None and split.last is None:
        counts = [split.num_counted_layers // number] * number
        counts[0] -= split.embedding_counts
        counts[-1] -= split.head_counts
    else:
        by_rank = _by_rank(split)
        counts = [by_rank[split.pipeline_rank(stage, vpp)] // vpp for stage in range(number)]
    return counts, [0] * (number - 1) + [split.mtp]


def _by_rank(split: PipelineSplit) -> list[int]:
    given = (split.first is not None) + (split.last is not None)
    rest = split.layers - (split.first or 0) - (split.last or 0)
    middle = [rest // (split.pp - given)] * (split.pp - given) if split.pp > given else []
    first = [] if split.first is None else [split.first]
    return [*first, *middle, *([] if split.last is None else [split.last])]
