"""Choose the other layout under which a rehearsal resumes, as a run does after its cluster has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megalaunch.plan.check import check
from megalaunch.plan.findings import has_errors
from megalaunch.plan.resolve import derive
from megalaunch.schema import RunSpec, with_values

_PLAIN_PIPELINE = {
    "parallel.vpp": None,
    "parallel.schedule": "auto",
    "parallel.pipeline_layout": None,
    "parallel.num_layers_in_first_pipeline_stage": None,
    "parallel.num_layers_in_last_pipeline_stage": None,
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
    "parallel.microbatch_group_size_per_vp_stage": None,
    "parallel.overlap_p2p_comm": False,
}


def other_layout(spec: RunSpec) -> RunSpec:
    """Return the spec of a rehearsal under another layout that is valid, preferably with half of every axis.

    The same one with outer steps: a run continues with the replicas that it has.
    """
    if spec.parallel.outer_steps:
        return spec
    for sizes in _candidates(spec):
        other, _ = derive(_with_sizes(spec, sizes))
        if not has_errors(check(other, None, "train")):
            return other
    return spec


def _candidates(spec: RunSpec) -> Iterator[dict[str, int]]:
    p = spec.parallel
    now = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "dp": p.dp or 1}
    halved = {axis: max(1, size // 2) for axis, size in now.items()}
    single = dict.fromkeys(now, 1)
    wide = ({**single, "tp": 2}, {**single, "dp": 2})
    ordered = (*wide, single) if halved == single else (halved, {**halved, "dp": 1}, *wide, single)
    yield from (sizes for sizes in ordered if sizes != now)


def _with_sizes(spec: RunSpec, sizes: dict[str, int]) -> RunSpec:
    p = spec.parallel
    values: dict[str, Any] = {f"parallel.{axis}": size for axis, size in sizes.items()}
    values |= {"parallel.ep": math.gcd(p.ep, sizes["tp"] * sizes["cp"] * sizes["dp"]), "parallel.etp": None}
    values |= {"parallel.dp_replicate": 1, "cluster.devices_per_node": math.prod(sizes.values())}
    if sizes["pp"] != p.pp:
        values |= _PLAIN_PIPELINE
    if sizes["tp"] == 1:
        values |= {"parallel.sequence_parallel": False, "parallel.tp_comm_overlap": False}
    if sizes["cp"] != p.cp:
        values |= {
            "parallel.cp_comm_type": "p2p",
            "parallel.hierarchical_context_parallel_sizes": (),
            "parallel.dynamic_context_parallel": p.dynamic_context_parallel and sizes["cp"] > 1,
        }
    return with_values(spec, values)
