"""Rules of the devices a run is made for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS


@rule("platform.chip", "The chip is one whose facts are known.")
def chip(at: RuleContext) -> Iterator[Violation]:
    """Memory, formats and peak come from that row."""
    name = at.spec.platform.chip
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=2, cutoff=0.5)
        yield Violation(
            "platform.chip",
            f"the chip {name!r} is not known (known: {', '.join(CHIPS)})",
            fixes=tuple({"platform.chip": known} for known in near),
        )


@rule("cluster.devices", "The number of devices of a machine is known.")
def devices(at: RuleContext) -> Iterator[Violation]:
    """`auto` counts those of this machine, which says nothing about another chip."""
    cluster, name = at.spec.cluster, at.spec.platform.chip
    if cluster.devices_per_node == "auto" and name in CHIPS:
        need = at.shards * (at.spec.parallel.dp or 1)
        per_node = max(1, -(-need // cluster.nodes))
        yield Violation(
            "cluster.devices_per_node",
            f"auto counts the devices of this machine, and it has no {name}; say how many each machine has",
            {"need": need},
            ({"cluster.devices_per_node": 8}, {"cluster.devices_per_node": per_node}),
        )
