"""The split of layers over pipeline stages, and the violations of an invalid split.

Each `StageViolation` has the id of the rule that reports it (plan/rules/stages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megalaunch.plan.pipeline_layout import PipelineLayoutError, expand_layout
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ParallelSpec

V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules whose second chunks are placed in reverse order, from the last rank to the first."""
_SPLIT_BACKWARD = ("zero_bubble", *V_SCHEDULES)


def splits_backward(parallel: ParallelSpec) -> bool:
    """Return whether a pipeline computes the gradients of weights in a backward pass of their own."""
    return (parallel.pp or 1) > 1 and parallel.schedule in _SPLIT_BACKWARD


@dataclass(frozen=True)
class StageViolation:
    """Why layers cannot be split: the rule, the invalid key, a message and its numbers."""

    rule: str
    path: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineSplit:
    """The values that decide the stage of each layer; `vpp` as given."""

    layers: int
    mtp: int
    pp: int
    vpp: int | None
    first: int | None
    last: int | None
    embedding_counts: bool
    head_counts: bool
    layout: str | None
    v_shaped: bool

    @classmethod
    def from_spec(cls, spec: RunSpec) -> PipelineSplit:
        """Return the pipeline split of a spec."""
        p = spec.parallel
        return cls(
            layers=spec.model.num_layers,
            mtp=spec.model.mtp.num_layers,
            pp=p.pp,
            vpp=p.vpp,
            first=p.num_layers_in_first_pipeline_stage,
            last=p.num_layers_in_last_pipeline_stage,
            embedding_counts=p.account_for_embedding_in_pipeline_split,
            head_counts=p.account_for_loss_in_pipeline_split,
            layout=p.pipeline_layout,
            v_shaped=p.schedule in V_SCHEDULES,
        )

    @property
    def num_counted_layers(self) -> int:
        """Layers to split, with embedding and head where they count as a layer."""
        return self.layers + self.embedding_counts + self.head_counts

    def pipeline_rank(self, stage: int, chunks: int) -> int:
        """Return the pp rank of a stage: round-robin, or in reverse for the second chunks of a V-shaped schedule."""
        chunk, index = divmod(stage, self.pp)
        return self.pp - 1 - index if self.v_shaped and chunks == 2 and chunk == 1 else index


@lru_cache(maxsize=4096)
def find_stage_violations(split: PipelineSplit) -> tuple[StageViolation, ...]:
    """Return the violations of a split; empty if it is valid."""
    if split.layout is not None:
        return tuple(_layout_violations(split, split.layout))
    if split.pp == 1 and (split.vpp or 1) > 1:
        return (_no_pipeline(split.vpp or 1),)
    if split.first is not None or split.last is not None:
        return tuple(_uneven_violations(split))
    return tuple(_even_violations(split))


def _even_violations(split: PipelineSplit) -> Iterator[StageViolation]:
    pp, vpp = split.pp, split.vpp or 1
    share, rest = divmod(split.num_counted_layers, pp)
    numbers: dict[str, Any] = {"num_layers": split.layers, "pp": pp}
    layers = f"{split.layers} layers"
    counted = [name for name, counts in _counted_ends(split) if counts]
    if counted:
        numbers["counted"] = split.num_counted_layers
        layers = f"{layers} with {' and '.join(counted)} counted as {split.num_counted_layers}"
    if rest:
        yield StageViolation("parallel.layers_by_pp", "parallel.pp", f"{layers} are not divisible by pp {pp}", numbers)
    elif share % vpp:
        message = f"{_counted_layers(share)} per stage ({layers} / pp {pp}) cannot be split evenly by vpp {vpp}"
        numbers |= {"vpp": vpp, "layers_per_stage": share}
        yield StageViolation("parallel.layers_by_vpp", "parallel.vpp", message, numbers)


def _counted_layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _no_pipeline(vpp: int) -> StageViolation:
    message = f"vpp {vpp} interleaves pipeline stages, but pp is 1"
    return StageViolation("parallel.vpp_needs_pp", "parallel.vpp", message, {"vpp": vpp, "pp": 1})


def _counted_ends(split: PipelineSplit) -> tuple[tuple[str, bool], ...]:
    return ("the embedding", split.embedding_counts), ("the head", split.head_counts)


def _uneven_violations(split: PipelineSplit) -> Iterator[StageViolation]:
    pp, vpp, layers = split.pp, split.vpp or 1, split.layers
    ends = {"first": split.first, "last": split.last}
    given = {f"num_layers_in_{end}_pipeline_stage": value for end, value in ends.items() if value is not None}
    path = f"parallel.{next(iter(given))}"
    numbers: dict[str, Any] = {"num_layers": layers, "pp": pp, **given}
    named = " and ".join(f"{name} {value}" for name, value in given.items())
    if split.embedding_counts or split.head_counts:
        message = (
            f"{named} conflicts with account_for_embedding_in_pipeline_split "
            "and account_for_loss_in_pipeline_split: set one of them"
        )
        yield StageViolation("parallel.one_division", path, message, numbers)
        return
    if pp == 1:
        message = f"{named} needs pp above 1, but pp is 1"
        yield StageViolation("parallel.uneven_needs_pp", path, message, numbers)
        return
    for name, value in given.items():
        if value % vpp:
            message = f"{name} {value} is not divisible by vpp {vpp}"
            yield StageViolation("parallel.layers_by_vpp", f"parallel.{name}", message, {**numbers, "vpp": vpp})
    rest, ranks = layers - sum(given.values()), pp - len(given)
    if rest < 0 or (ranks == 0) != (rest == 0) or (ranks and rest % ranks):
        message = f"{named} leaves {rest} of {layers} layers, which cannot be split evenly over {ranks} other ranks"
        yield StageViolation("parallel.uneven_rest", path, message, {**numbers, "rest": rest, "ranks": ranks})
    elif ranks and (rest // ranks) % vpp:
        share = _counted_layers(rest // ranks)
        message = f"{share} of a middle rank ({rest} / {ranks}) cannot be split evenly by vpp {vpp}"
        yield StageViolation(
            "parallel.layers_by_vpp",
            "parallel.vpp",
            message,
            {**numbers, "vpp": vpp, "layers_per_stage": rest // ranks},
        )


def _layout_violations(split: PipelineSplit, layout: str) -> Iterator[StageViolation]:
    path = "parallel.pipeline_layout"
    try:
        stages = expand_layout(layout)
    except PipelineLayoutError as error:
        yield StageViolation("parallel.layout_grammar", path, str(error), {"pipeline_layout": layout})
        return
    numbers = {"stages": len(stages), "pp": split.pp}
    others = _other_settings(split)
    if others:
        message = f"pipeline_layout conflicts with {' and '.join(others)}: set one of them"
        yield StageViolation("parallel.one_division", path, message)
    vpp, rest = divmod(len(stages), split.pp)
    if rest:
        message = f"the {len(stages)} stages of pipeline_layout are not divisible by pp {split.pp}"
        yield StageViolation("parallel.layout_by_pp", path, message, numbers)
    elif split.vpp is not None and split.vpp != vpp:
        message = (
            f"vpp {split.vpp} is given, but pipeline_layout has {len(stages)} stages: {vpp} per rank of pp {split.pp}"
        )
        yield StageViolation("parallel.layout_by_vpp", "parallel.vpp", message, {**numbers, "vpp": split.vpp})
    elif split.pp == 1 and vpp > 1:
        yield _no_pipeline(vpp)
    yield from _layout_letter_violations(split, stages)


def _other_settings(split: PipelineSplit) -> list[str]:
    found = {
        "num_layers_in_first_pipeline_stage": split.first is not None,
        "num_layers_in_last_pipeline_stage": split.last is not None,
        "account_for_embedding_in_pipeline_split": split.embedding_counts,
        "account_for_loss_in_pipeline_split": split.head_counts,
    }
    return [name for name, given in found.items() if given]


def _layout_letter_violations(split: PipelineSplit, stages: tuple[str, ...]) -> Iterator[StageViolation]:
    path, letters = "parallel.pipeline_layout", "".join(stages)
    ends = letters.count("E") == letters.count("L") == 1 and stages[0][:1] == "E" and stages[-1][-1:] == "L"
    if not ends:
        message = (
            "pipeline_layout must start with its only E (embedding) and end with its only L (head and loss), "
            f"but it has {letters.count('E')} E and {letters.count('L')} L"
        )
        yield StageViolation(
            "parallel.layout_ends", path, message, {"embeddings": letters.count("E"), "heads": letters.count("L")}
        )
    layers, depths = letters.count("t"), letters.count("m")
    if layers != split.layers:
        message = f"pipeline_layout has {layers} layers (t), but the model has {split.layers}"
        yield StageViolation(
            "parallel.layout_layers", path, message, {"layout_layers": layers, "num_layers": split.layers}
        )
    if depths != split.mtp:
        message = f"pipeline_layout has {depths} MTP depths (m), but the model has {split.mtp}"
        yield StageViolation(
            "parallel.layout_mtp", path, message, {"layout_mtp_layers": depths, "mtp_layers": split.mtp}
        )
    elif depths:
        yield from _mtp_stage_violations(split, stages)


def _mtp_stage_violations(split: PipelineSplit, stages: tuple[str, ...]) -> Iterator[StageViolation]:
    path, letters = "parallel.pipeline_layout", "".join(stages)
    mtp_stages = [number for number, stage in enumerate(stages) if "m" in stage]
    chunks = max(1, len(stages) // split.pp)
    rank, chunk = split.pipeline_rank(mtp_stages[0], chunks), mtp_stages[0] // split.pp
    reasons = []
    if letters.index("m") < letters.rindex("t"):
        reasons.append("they come before the last layer")
    if len(mtp_stages) > 1:
        reasons.append(f"they are on {len(mtp_stages)} stages")
    elif split.pp > 1 and chunk != chunks - 1:
        reasons.append(f"they are in chunk {chunk} of their rank, not in the last one")
    elif split.pp > 1 and rank == 0 and not split.v_shaped:
        reasons.append("they are on the first rank")
    if reasons:
        message = (
            "MTP depths (m) must follow all layers, on one stage, the last of a rank other than the first; "
            + " and ".join(reasons)
        )
        yield StageViolation("parallel.layout_mtp_place", path, message, {"stages_with_mtp": mtp_stages})
