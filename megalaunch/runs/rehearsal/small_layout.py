"""Shrink a layout to at most MAX_WORKERS ranks: of ranks that do the same work, a few are played.

Every axis with several ranks keeps at least two, so that each of its collectives still runs between processes; only
data parallelism, whose ranks differ least, goes to one where two would be too many.
"""

from __future__ import annotations

import math
from typing import Any

from megalaunch.plan.pipeline_layout import expand_layout
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ParallelSpec

MAX_WORKERS = 16
_MODEL_AXES = ("pp", "tp", "cp")  # of equally large ones the first is reduced


def small_layout(spec: RunSpec) -> dict[str, Any]:
    """Return the `parallel` keys of a resolved spec that change, and the `cluster` keys that follow from them."""
    p = spec.parallel
    sizes = {axis: getattr(p, axis) for axis in _MODEL_AXES}
    dp, replicas = _data_parallel(p, math.prod(sizes.values()))
    if p.ep > 1 and sizes["tp"] * sizes["cp"] == 1:
        dp = max(2, dp)  # otherwise no rank is left to hold other experts
    while math.prod(sizes.values()) * dp > MAX_WORKERS:
        axis = _largest(sizes, _smallest_cp(p))
        if axis is None:
            dp, replicas = 1, 1
            break
        sizes[axis] //= _smallest_factor(sizes[axis])
    values: dict[str, Any] = {f"parallel.{axis}": size for axis, size in sizes.items()}
    values |= {"parallel.dp": dp, "parallel.dp_replicate": replicas}
    if (dp if p.data_sharding == "no_shard" else replicas) == 1:
        values["parallel.outer_steps"] = 0  # no replica is left to train apart
    etp = None if p.etp is None else min(p.etp, 2)
    stage_ranks = sizes["tp"] * sizes["cp"] * dp  # each of a stage's ranks has other tokens
    values |= {"parallel.ep": math.gcd(p.ep, stage_ranks // math.gcd(stage_ranks, etp or 1)), "parallel.etp": etp}
    if p.hierarchical_context_parallel_sizes and sizes["cp"] != p.cp:
        values["parallel.hierarchical_context_parallel_sizes"] = (2, sizes["cp"] // 2)
    if p.microbatch_group_size_per_vp_stage is not None:
        values["parallel.microbatch_group_size_per_vp_stage"] = sizes["pp"]
    return {
        **values,
        "cluster.nodes": 1,
        "cluster.devices_per_node": math.prod(sizes.values()) * dp,
        "cluster.node_bandwidth": None,
        "cluster.sites": 1,
        "cluster.site_bandwidth": None,
        "cluster.site_latency": 0.0,
    }


def small_pipeline_layout(layout: str, pp: int, new_pp: int) -> str:
    """Return a layout with `new_pp` ranks and few layers a stage; stages with more layers than others still have more.

    Args:
        layout: in Megatron-LM's notation.
        pp: the ranks of the layout.
        new_pp: the ranks to keep: the first, the last and some between.
    """
    stages = expand_layout(layout)
    chunks = len(stages) // pp
    kept = [stages[chunk * pp + rank] for chunk in range(chunks) for rank in _spread(pp, new_pp)]
    if len(kept) > 1:  # embedding and head are on the first and last stage of the whole pipeline
        kept[0], kept[-1] = stages[0], stages[-1]
    fewest = min((stage.count("t") for stage in kept if "t" in stage), default=1)
    return "|".join(_with_fewer_layers(stage, fewest) for stage in kept)


def _with_fewer_layers(stage: str, fewest: int) -> str:
    count = stage.count("t")
    return stage.replace("t" * count, "t" if count <= fewest else "tt") if count else stage


def _spread(pp: int, new_pp: int) -> list[int]:
    """Return `new_pp` of the ranks 0 to pp - 1, evenly spread, with the first and the last."""
    return [round(index * (pp - 1) / max(1, new_pp - 1)) for index in range(new_pp)]


def _data_parallel(p: ParallelSpec, model_ranks: int) -> tuple[int, int]:
    """Return (dp, dp_replicate): two shards, or two replicas of two shards, if MAX_WORKERS allows."""
    dp = p.dp or 1
    if p.dp_replicate > 1 and model_ranks * 4 <= MAX_WORKERS:
        return 4, 2
    if dp > 1 and model_ranks * 2 <= MAX_WORKERS:
        return 2, 1
    return 1, 1


def _largest(sizes: dict[str, int], smallest_cp: int) -> str | None:
    """Return the axis with the most ranks that can have fewer and still several; None if there is none."""
    able = [
        axis
        for axis, size in sizes.items()
        if size // _smallest_factor(size) >= (smallest_cp if axis == "cp" else 2) and size > 1
    ]
    return max(able, key=lambda axis: sizes[axis]) if able else None


def _smallest_cp(p: ParallelSpec) -> int:
    return 4 if p.hierarchical_context_parallel_sizes else 2


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)
