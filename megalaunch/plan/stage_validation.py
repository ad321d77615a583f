"""The split of layers over pipeline stages, and the violations of an invalid split.

Each `StageViolation` has the id of the rule that reports it (plan/rules/stages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megalaunch.config.schema import RunSpec
from megalaunch.plan.pipeline_layout import LayoutError, expand_layout

V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules whose second chunks are placed in reverse order, from the last rank to the first."""


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
        chunk, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.v_shaped and chunks == 2 and chunk == 1 else place


@lru_cache(maxsize=4096)
def find_stage_violations(division: PipelineSplit) -> tuple[StageViolation, ...]:
    """Return the violations of a split; empty if it is valid."""
    if division.layout is not None:
        return tuple(_layout_faults(division, division.layout))
    if division.pp == 1 and (division.vpp or 1) > 1:
        return (_no_pipeline(division.vpp or 1),)
    if division.first is not None or division.last is not None:
        return tuple(_uneven_faults(division))
    return tuple(_even_faults(division))


def _even_faults(division: PipelineSplit) -> Iterator[StageViolation]:
    pp, vpp = division.pp, division.vpp or 1
    share, rest = divmod(division.num_counted_layers, pp)
    numbers: dict[str, Any] = {"num_layers": division.layers, "pp": pp}
    whole = f"{division.layers} layers"
    extra = [name for name, counts in _extras(division) if counts]
    if extra:
        numbers["counted"] = division.num_counted_layers
        whole = f"{whole} with {' and '.join(extra)} counted as {division.num_counted_layers}"
    if rest:
        yield StageViolation("parallel.layers_by_pp", "parallel.pp", f"{whole} do not divide by pp {pp}", numbers)
    elif share % vpp:
        message = f"{share} layers of a stage ({whole} / pp {pp}) do not divide by vpp {vpp}"
        numbers |= {"vpp": vpp, "layers_per_stage": share}
        yield StageViolation("parallel.layers_by_vpp", "parallel.vpp", message, numbers)


def _no_pipeline(vpp: int) -> StageViolation:
    message = f"vpp {vpp} interleaves pipeline stages, and pp is 1"
    return StageViolation("parallel.vpp_needs_pp", "parallel.vpp", message, {"vpp": vpp, "pp": 1})


def _extras(division: PipelineSplit) -> tuple[tuple[str, bool], ...]:
    return ("the embedding", division.embedding_counts), ("the head", division.head_counts)


def _uneven_faults(division: PipelineSplit) -> Iterator[StageViolation]:
    pp, vpp, layers = division.pp, division.vpp or 1, division.layers
    ends = {"first": division.first, "last": division.last}
    given = {f"num_layers_in_{end}_pipeline_stage": value for end, value in ends.items() if value is not None}
    path = f"parallel.{next(iter(given))}"
    numbers: dict[str, Any] = {"num_layers": layers, "pp": pp, **given}
    named = " and ".join(f"{name} {value}" for name, value in given.items())
    if division.embedding_counts or division.head_counts:
        message = (
            f"{named} says what the ends hold, and account_for_embedding_in_pipeline_split "
            "or account_for_loss_in_pipeline_split says it again"
        )
        yield StageViolation("parallel.one_division", path, message, numbers)
        return
    if pp == 1:
        message = f"{named} makes stages of a pipeline uneven, and pp is 1"
        yield StageViolation("parallel.uneven_needs_pp", path, message, numbers)
        return
    for name, value in given.items():
        if value % vpp:
            message = f"{name} {value} does not divide by vpp {vpp}"
            yield StageViolation("parallel.layers_by_vpp", f"parallel.{name}", message, {**numbers, "vpp": vpp})
    rest, ranks = layers - sum(given.values()), pp - len(given)
    if rest < 0 or (ranks == 0) != (rest == 0) or (ranks and rest % ranks):
        message = f"{named} leaves {rest} of {layers} layers for {ranks} other ranks, which is no even share"
        yield StageViolation("parallel.uneven_rest", path, message, {**numbers, "rest": rest, "ranks": ranks})
    elif ranks and (rest // ranks) % vpp:
        message = f"{rest // ranks} layers of a middle rank ({rest} / {ranks}) do not divide by vpp {vpp}"
        yield StageViolation(
            "parallel.layers_by_vpp",
            "parallel.vpp",
            message,
            {**numbers, "vpp": vpp, "layers_per_stage": rest // ranks},
        )


def _layout_faults(division: PipelineSplit, layout: str) -> Iterator[StageViolation]:
    path = "parallel.pipeline_layout"
    try:
        stages = expand_layout(layout)
    except LayoutError as error:
        yield StageViolation("parallel.layout_grammar", path, str(error), {"pipeline_layout": layout})
        return
    numbers = {"stages": len(stages), "pp": division.pp}
    others = _other_divisions(division)
    if others:
        message = f"pipeline_layout says what each stage holds, and {' and '.join(others)} says it again"
        yield StageViolation("parallel.one_division", path, message)
    vpp, rest = divmod(len(stages), division.pp)
    if rest:
        message = f"the {len(stages)} stages of pipeline_layout do not divide by pp {division.pp}"
        yield StageViolation("parallel.layout_by_pp", path, message, numbers)
    elif division.vpp is not None and division.vpp != vpp:
        message = (
            f"vpp {division.vpp} is given, and pipeline_layout has {len(stages)} stages: {vpp} on each of {division.pp}"
        )
        yield StageViolation("parallel.layout_by_vpp", "parallel.vpp", message, {**numbers, "vpp": division.vpp})
    elif division.pp == 1 and vpp > 1:
        yield _no_pipeline(vpp)
    yield from _layout_contents(division, stages)


def _other_divisions(division: PipelineSplit) -> list[str]:
    found = {
        "num_layers_in_first_pipeline_stage": division.first is not None,
        "num_layers_in_last_pipeline_stage": division.last is not None,
        "account_for_embedding_in_pipeline_split": division.embedding_counts,
        "account_for_loss_in_pipeline_split": division.head_counts,
    }
    return [name for name, given in found.items() if given]


def _layout_contents(division: PipelineSplit, stages: tuple[str, ...]) -> Iterator[StageViolation]:
    path, letters = "parallel.pipeline_layout", "".join(stages)
    ends = letters.count("E") == letters.count("L") == 1 and stages[0][:1] == "E" and stages[-1][-1:] == "L"
    if not ends:
        message = (
            "a layout begins with its only E (embedding) and ends with its only L (head and loss); "
            f"this one has {letters.count('E')} E and {letters.count('L')} L"
        )
        yield StageViolation(
            "parallel.layout_ends", path, message, {"embeddings": letters.count("E"), "heads": letters.count("L")}
        )
    layers, depths = letters.count("t"), letters.count("m")
    if layers != division.layers:
        message = f"pipeline_layout has {layers} layers (t), and the model {division.layers}"
        yield StageViolation(
            "parallel.layout_layers", path, message, {"layout_layers": layers, "num_layers": division.layers}
        )
    if depths != division.mtp:
        message = f"pipeline_layout has {depths} MTP depths (m), and the model {division.mtp}"
        yield StageViolation(
            "parallel.layout_mtp", path, message, {"layout_mtp_layers": depths, "mtp_layers": division.mtp}
        )
    elif depths:
        yield from _mtp_place(division, stages)


def _mtp_place(division: PipelineSplit, stages: tuple[str, ...]) -> Iterator[StageViolation]:
    path, letters = "parallel.pipeline_layout", "".join(stages)
    holders = [number for number, stage in enumerate(stages) if "m" in stage]
    chunks = max(1, len(stages) // division.pp)
    rank, chunk = division.pipeline_rank(holders[0], chunks), holders[0] // division.pp
    reasons = []
    if letters.index("m") < letters.rindex("t"):
        reasons.append("they come before the last layer")
    if len(holders) > 1:
        reasons.append(f"they lie on {len(holders)} stages")
    elif division.pp > 1 and chunk != chunks - 1:
        reasons.append(f"they lie in chunk {chunk} of their rank, not in its last")
    elif division.pp > 1 and rank == 0 and not division.v_shaped:
        reasons.append("they lie on the first rank")
    if reasons:
        message = (
            "MTP depths (m) follow all layers, together on one stage, the last of a rank other than the first: "
            + " and ".join(reasons)
        )
        yield StageViolation("parallel.layout_mtp_place", path, message, {"stages_with_mtp": holders})
