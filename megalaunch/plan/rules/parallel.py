"""Rules of the two grids: world = dp x pp x cp x tp for dense layers, edp x pp x ep x etp for routed experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest, other_clusters
from megalaunch.plan.world import expert_model_parallel_size

# What has no effect without expert parallelism.
_NO_DISPATCH: Fix = {
    "parallel.moe_token_dispatcher_type": "alltoall",
    "parallel.overlap_moe_expert_parallel_comm": False,
}


@rule("parallel.world", "The world size is divisible by tp x pp x cp.")
def world(at: RuleContext) -> Iterator[Violation]:
    """world = dp x pp x cp x tp: every rank has one coordinate on each axis of the dense grid."""
    p, cluster = at.spec.parallel, at.spec.cluster
    if at.world is None or at.world % at.model_parallel_size == 0:
        return
    degrees = {axis: getattr(p, axis) for axis in ("tp", "pp", "cp") if getattr(p, axis) > 1}
    need = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    lacks = (
        f"needs {at.model_parallel_size}"
        if at.world < at.model_parallel_size
        else f"needs a multiple of {at.model_parallel_size}"
    )
    yield Violation(
        "cluster.nodes",
        f"the world has {at.world} devices ({cluster.nodes} x {cluster.devices_per_node}); the layout {lacks} ({need})",
        {"world": at.world, "need": at.model_parallel_size, **degrees},
        (*other_clusters(at), *_smaller_layouts(at), *_other_layouts(at)),
    )


def _smaller_layouts(at: RuleContext) -> Iterator[Fix]:
    world = at.world or 0
    for axis in ("pp", "tp", "cp"):
        degree = getattr(at.spec.parallel, axis)
        rest = at.model_parallel_size // degree

        def legal(smaller: int, degree: int = degree, rest: int = rest) -> bool:
            return smaller < degree and world % (rest * smaller) == 0

        yield from nearest(f"parallel.{axis}", min(degree, world // rest + 1), legal, 1)


def _other_layouts(at: RuleContext) -> Iterator[Fix]:
    """Yield pairs of tp and pp, powers of two near the invalid ones, that divide the world."""
    p, world = at.spec.parallel, at.world or 0
    powers = [2**n for n in range(8)]
    pairs = [(tp, pp) for tp, pp in product(powers, powers) if world % (tp * pp * p.cp) == 0]
    pairs = [pair for pair in pairs if pair[0] != p.tp and pair[1] != p.pp]
    near = sorted(pairs, key=lambda pair: abs(math.log2(pair[0] / p.tp)) + abs(math.log2(pair[1] / p.pp)))[:3]
    for tp, pp in near:
        yield {"parallel.tp": tp, "parallel.pp": pp}
    for tp, pp in near:
        if tp > 1:  # some specs fit only with it
            yield {"parallel.tp": tp, "parallel.pp": pp, "parallel.sequence_parallel": True}


@rule("parallel.dp_assertion", "A given dp equals world / (tp x pp x cp).")
def dp_assertion(at: RuleContext) -> Iterator[Violation]:
    """dp is derived; a given dp asserts the result."""
    asserted = at.spec.parallel.dp
    if (
        at.world is None
        or asserted is None
        or at.world % at.model_parallel_size
        or asserted * at.model_parallel_size == at.world
    ):
        return
    actual, asked = at.world // at.model_parallel_size, asserted * at.model_parallel_size
    nodes, per_node = int(at.spec.cluster.nodes), int(at.spec.cluster.devices_per_node)
    fixes: list[Fix] = [{"parallel.dp": actual}]
    if asked % per_node == 0:
        fixes.append({"cluster.nodes": asked // per_node})
    if asked % nodes == 0:
        fixes.append({"cluster.devices_per_node": asked // nodes})
    yield Violation(
        "parallel.dp",
        f"dp {asserted} is given, but a world of {at.world} devices has dp {actual} "
        f"({at.world} / tp x pp x cp {at.model_parallel_size})",
        {"dp": asserted, "derived_dp": actual, "world": at.world, "model_parallel_size": at.model_parallel_size},
        tuple(fixes),
    )


@rule("parallel.ep_needs_experts", "ep and etp are above 1 only for a model with experts.")
def ep_needs_experts(at: RuleContext) -> Iterator[Violation]:
    """A dense model has no experts to shard."""
    p = at.spec.parallel
    for axis, degree in (("ep", p.ep), ("etp", p.etp or 1)):
        if degree > 1 and not at.has_experts:
            yield Violation(
                f"parallel.{axis}",
                f"{axis} {degree} shards experts, but {at.spec.model.name} has none",
                {axis: degree},
                ({f"parallel.{axis}": 1}, {"parallel.ep": 1, "parallel.etp": 1}),
            )


@rule("parallel.dispatcher_needs_experts", "moe_token_dispatcher_type is set only for a model with experts.")
def dispatcher_needs_experts(at: RuleContext) -> Iterator[Violation]:
    """A dense model dispatches no tokens, so the setting has no effect."""
    dispatch = at.spec.parallel.moe_token_dispatcher_type
    if dispatch != "alltoall" and not at.has_experts:
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            f"moe_token_dispatcher_type={dispatch} has no effect: {at.spec.model.name} has no experts",
            {},
            ({"parallel.moe_token_dispatcher_type": "alltoall"},),
            "warning",
        )


@rule("parallel.expert_world", "The world size is divisible by pp x ep x etp.")
def expert_world(at: RuleContext) -> Iterator[Violation]:
    """world = edp x pp x ep x etp: routed experts have a grid of their own over the same ranks."""
    p = at.spec.parallel
    need = expert_model_parallel_size(p)
    if at.world is None or at.world % need == 0 or (p.ep == 1 and (p.etp or 1) == 1):
        return
    yield Violation(
        "parallel.ep",
        f"a world of {at.world} devices is not divisible by the expert grid "
        f"of pp {p.pp} x ep {p.ep} x etp {p.etp or 1} = {need}",
        {"world": at.world, "need": need},
        (
            *nearest("parallel.ep", p.ep, lambda n: at.world is not None and at.world % (need // p.ep * n) == 0, 2),
            *other_clusters(at),
            {"parallel.ep": 1, "parallel.etp": 1},
            {"parallel.ep": 1, "parallel.etp": 1, **_NO_DISPATCH},
        ),
    )


@rule("parallel.dp_replicate_by_dp", "dp is divisible by dp_replicate.")
def dp_replicate_by_dp(at: RuleContext) -> Iterator[Violation]:
    """dp = dp_replicate x dp_shard. HSDP shards states within a replica and all-reduces gradients over replicas."""
    replicas, dp = at.spec.parallel.dp_replicate, at.dp
    if dp is not None and dp % replicas:
        yield Violation(
            "parallel.dp_replicate",
            f"dp {dp} is not divisible by dp_replicate {replicas}",
            {"dp": dp, "dp_replicate": replicas},
            (*nearest("parallel.dp_replicate", replicas, lambda n: dp % n == 0, 2), *other_clusters(at)),
        )


@rule("parallel.dp_replicate_by_expert_dp", "Expert dp is divisible by dp_replicate.")
def dp_replicate_by_expert_dp(at: RuleContext) -> Iterator[Violation]:
    """Dense and expert parameters have the same number of replicas."""
    replicas, edp = at.spec.parallel.dp_replicate, at.edp
    if at.has_experts and edp is not None and at.dp is not None and at.dp % replicas == 0 and edp % replicas:
        yield Violation(
            "parallel.dp_replicate",
            f"expert dp {edp} is not divisible by dp_replicate {replicas}",
            {"expert_dp": edp, "dp_replicate": replicas},
            (
                *nearest("parallel.dp_replicate", replicas, lambda n: edp % n == 0, 2),
                *nearest("parallel.ep", at.spec.parallel.ep, lambda n: n < at.spec.parallel.ep),
            ),
        )


@rule("parallel.dp_replicate_needs_sharding", "dp_replicate is above 1 only with data_sharding.")
def dp_replicate_needs_sharding(at: RuleContext) -> Iterator[Violation]:
    """With data_sharding=no_shard every data-parallel rank is a replica already."""
    p = at.spec.parallel
    if p.data_sharding == "no_shard" and p.dp_replicate > 1:
        yield Violation(
            "parallel.dp_replicate",
            f"dp_replicate {p.dp_replicate} conflicts with data_sharding=no_shard: "
            "every data-parallel rank is a replica already",
            {"dp_replicate": p.dp_replicate},
            ({"parallel.dp_replicate": 1}, {"parallel.data_sharding": "optim"}),
        )


@rule("parallel.dp_replicate_leaves_shards", "dp_replicate is smaller than dp.")
def dp_replicate_leaves_shards(at: RuleContext) -> Iterator[Violation]:
    """With dp_replicate = dp every rank has a full copy, and data_sharding saves no memory."""
    p = at.spec.parallel
    if p.dp_replicate > 1 and p.data_sharding != "no_shard" and p.cp == 1 and at.dp == p.dp_replicate:
        yield Violation(
            "parallel.dp_replicate",
            f"dp_replicate {p.dp_replicate} equals dp: data_sharding={p.data_sharding} shards nothing",
            {"dp_replicate": p.dp_replicate, "dp": at.dp},
            ({"parallel.dp_replicate": 1}, {"parallel.dp_replicate": 1, "parallel.data_sharding": "no_shard"}),
            "warning",
        )


@rule("parallel.tp_within_machine", "Every tensor-parallel group is within one node.")
def tp_within_machine(at: RuleContext) -> Iterator[Violation]:
    """Tensor-parallel collectives run before and after every matmul; between nodes they are about ten times slower."""
    tp, per_node = at.spec.parallel.tp, at.spec.cluster.devices_per_node
    if not isinstance(per_node, int) or at.spec.cluster.nodes == 1 or tp == 1 or per_node % tp == 0:
        return
    if at.world is not None and at.world % at.model_parallel_size == 0:
        within = [*nearest("parallel.tp", tp, lambda n: per_node % n == 0)]
        yield Violation(
            "parallel.tp",
            f"tp {tp} does not divide the {per_node} devices of a node: some groups span nodes",
            {"tp": tp, "devices_per_node": per_node},
            (*within, *({**fix, "parallel.sequence_parallel": True} for fix in within)),
            "warning",
        )


@rule("parallel.gathers_by_microbatch", "A pipeline gathers parameters and reduces gradients once a step.")
def gathers_by_microbatch(at: RuleContext) -> Iterator[Violation]:
    """optim_grads and optim_grads_params communicate with every microbatch, of which a pipeline needs many."""
    p, data_ranks, microbatches = at.spec.parallel, (at.dp or 1) * at.spec.parallel.cp, at.microbatches or 1
    does = {"optim_grads": "reduces all gradients", "optim_grads_params": "all-gathers all parameters"}
    if p.data_sharding in does and p.pp > 1 and data_ranks > 1 and microbatches > 1:
        yield Violation(
            "parallel.data_sharding",
            f"{p.data_sharding} with pp {p.pp} {does[p.data_sharding]} for each of {microbatches} microbatches",
            {"pp": p.pp, "microbatches": microbatches},
            ({"parallel.data_sharding": "optim"},),
            "warning",
        )
