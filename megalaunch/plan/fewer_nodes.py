"""Fewer nodes for a run that has lost some: the same layout and global batch, on fewer data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalaunch.plan.batch import batch_gcd
from megalaunch.plan.rules.registry import RULES, RuleContext
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.plan.world import data_parallel_size, replicas_and_shards
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.paths import value_at

_OFF = {
    "launcher.min_nodes": None,
    "launcher.rejoin_every": 1,
    "launcher.slurm.spare_nodes": 0,
    "launcher.slurm.replace_stragglers": False,
}
"""Limit and spare nodes are those of the run on all its nodes, whose launcher keeps them."""


@dataclass(frozen=True)
class NodeCount:
    """A number of nodes below `cluster.nodes`, and whether the run is valid on them.

    Attributes:
        values: of the run on these nodes, by key; those of all other keys stay.
        problem: why it is not valid; "": it is.
    """

    nodes: int
    values: Mapping[str, Any]
    problem: str = ""


def smaller_node_counts(at: RuleContext, fewest: int) -> Iterator[NodeCount]:
    """Yield the numbers of nodes from `cluster.nodes` - 1 down to `fewest`, each checked by every rule.

    tp, pp, cp, ep, the shards of HSDP, the micro batch and the global batch stay, so that each of the fewer replicas
    accumulates more microbatches. Errors that the run has on all its nodes do not count.

    Args:
        at: a resolved spec, whose nodes, dp and micro batch are known.
    """
    known: Mapping[tuple[str, str], str] | None = None
    for nodes in range(int(at.spec.cluster.nodes) - 1, fewest - 1, -1):
        values, problem = _on_fewer_nodes(at.spec, nodes)
        if not problem:
            if known is None:
                known = _errors(at, _off(at.spec))
            new = {key: text for key, text in _errors(at, values).items() if key not in known}
            problem = next((f"{text} [{rule}]" for (rule, _), text in new.items()), "")
        yield NodeCount(nodes, values, problem)


def _off(spec: RunSpec) -> dict[str, Any]:
    """Return `_OFF`, without what this spec does not set."""
    return {key: value for key, value in _OFF.items() if value_at(spec, key) != value}


def _on_fewer_nodes(spec: RunSpec, nodes: int) -> tuple[dict[str, Any], str]:
    """Return the values of a spec on fewer nodes, and why its replicas or its batch do not divide; "": they do."""
    world, micro_batch = nodes * int(spec.cluster.devices_per_node), spec.batch.micro_batch_size or 1
    dp = data_parallel_size(world, spec.parallel)
    if dp is None:
        return {}, f"{world} devices hold no whole number of replicas"
    if batch_gcd(spec) % (dp * micro_batch):
        return {}, f"a batch of {batch_gcd(spec)} is not divisible by dp {dp} x micro_batch_size {micro_batch}"
    values = {"cluster.nodes": nodes, "parallel.dp": dp, "batch.micro_batch_size": micro_batch, **_off(spec)}
    if spec.parallel.dp_replicate > 1:
        _, shards = replicas_and_shards(spec.parallel.dp or dp, spec.parallel)
        if shards is None or dp % shards:
            return {}, f"dp {dp} is not divisible by the {shards} shards of a replica"
        values["parallel.dp_replicate"] = dp // shards
    return values, ""


def _errors(at: RuleContext, values: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the message of each error of the spec with other values, by rule and path."""
    there = replace(at, spec=with_values(at.spec, values))
    with suggestions_disabled():
        return {
            (entry.id, item.path): item.message
            for entry in RULES.values()
            for item in entry.check(there)
            if item.severity == "error"
        }
