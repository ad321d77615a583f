"""Rules of several sites: which groups of ranks are on both sides of the slow link between them."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest
from megalaunch.plan.world import replicas_and_shards, site_size


@rule("cluster.nodes_by_sites", "The nodes are divisible by the sites.")
def nodes_by_sites(at: RuleContext) -> Iterator[Violation]:
    """Sites have equally many nodes: the first ranks are those of the first site."""
    nodes, sites = at.spec.cluster.nodes, at.spec.cluster.sites
    if isinstance(nodes, int) and nodes % sites:
        yield Violation(
            "cluster.sites",
            f"{nodes} node{'s are' if nodes > 1 else ' is'} not divisible by {sites} sites",
            {"nodes": nodes, "sites": sites},
            (
                {"cluster.nodes": (nodes // sites + 1) * sites},
                *nearest("cluster.sites", sites, lambda n: nodes % n == 0, 1),
            ),
        )


@rule("cluster.replicas_by_sites", "Only replicas of the model are in several sites.")
def replicas_by_sites(at: RuleContext) -> Iterator[Violation]:
    """Their all-reduce is once a step, with outer_steps once a round; others wait for the slow link more often."""
    p, site = at.spec.parallel, site_size(at.spec.cluster)
    if site is None or at.dp is None:
        return
    replicas, shards = replicas_and_shards(at.dp, p)
    if shards is None:
        return
    stride, across = 1, []
    for axis, size in (("tp", p.tp), ("cp", p.cp), ("dp_shard", shards), ("dp_replicate", replicas), ("pp", p.pp)):
        stride *= size
        if size > 1 and site % stride and axis != "dp_replicate":
            across.append(axis)
    if not across:
        return
    sites = at.spec.cluster.sites
    names = ", ".join("data-parallel shards" if axis == "dp_shard" else f"{axis} ranks" for axis in across)
    hsdp = {"parallel.dp_replicate": max(sites, replicas)} if p.data_sharding != "no_shard" else {}
    yield Violation(
        "cluster.sites",
        f"{names} are in several of the {sites} sites: their collectives cross the link between sites "
        + ("in every microbatch" if across != ["dp_shard"] else "with all parameters in every step"),
        {"sites": sites, "devices_of_a_site": site, "across": across},
        tuple(fix for fix in (hsdp, {**hsdp, "parallel.pp": 1}) if fix),
        severity="warning",
    )


register_inert(
    InertSetting(
        "cluster.site_link_idle",
        "site_bandwidth and site_latency are set only with several sites.",
        "They are those of the link between sites.",
        ("cluster.site_bandwidth", "cluster.site_latency"),
        "cluster.sites",
        lambda spec: spec.cluster.sites > 1,
        "cluster.sites is 1",
        ({"cluster.sites": 2},),
    )
)
