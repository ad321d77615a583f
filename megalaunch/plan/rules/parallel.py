"""Rules of the layout: how the world, the heads and the widths divide over the axes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.plan.rules.nearby import nearest
from megalaunch.plan.rules.registry import Broken, Fix, Situation, rule


@rule("parallel.world", "The world divides into copies of the model: world = dp x pp x cp x tp.")
def world(at: Situation) -> Iterator[Broken]:
    """The dense grid has no remainder."""
    p, cluster = at.spec.parallel, at.spec.cluster
    if at.world is None or at.world % at.shards == 0:
        return
    degrees = {axis: getattr(p, axis) for axis in ("tp", "pp", "cp") if getattr(p, axis) > 1}
    need = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    lacks = f"needs {at.shards}" if at.world < at.shards else f"needs a multiple of {at.shards}"
    yield Broken(
        "cluster.nodes",
        f"the world has {at.world} devices ({cluster.nodes} x {cluster.devices_per_node}); the layout {lacks} ({need})",
        {"world": at.world, "need": at.shards, **degrees},
        (*_larger_worlds(at), *_smaller_layouts(at)),
    )


def _larger_worlds(at: Situation) -> Iterator[Fix]:
    per_node, nodes = at.spec.cluster.devices_per_node, at.spec.cluster.nodes
    if not isinstance(per_node, int):
        return
    need = at.shards * (at.spec.parallel.dp or 1)
    enough = need // math.gcd(need, per_node)  # the fewest machines that divide
    yield {"cluster.nodes": -(-nodes // enough) * enough}
    if nodes > enough:
        yield {"cluster.nodes": nodes // enough * enough}


def _smaller_layouts(at: Situation) -> Iterator[Fix]:
    world = at.world or 0
    for axis in ("pp", "tp", "cp"):
        degree = getattr(at.spec.parallel, axis)
        rest = at.shards // degree

        def legal(smaller: int, degree: int = degree, rest: int = rest) -> bool:
            return smaller < degree and world % (rest * smaller) == 0

        yield from nearest(f"parallel.{axis}", min(degree, world // rest + 1), legal, 1)


@rule("parallel.dp_assertion", "A given dp is the one that the world leaves.")
def dp_assertion(at: Situation) -> Iterator[Broken]:
    """dp is derived; a dp that is given asserts the result."""
    asserted = at.spec.parallel.dp
    if at.world is None or asserted is None or at.world % at.shards or asserted * at.shards == at.world:
        return
    actual, per_node = at.world // at.shards, at.spec.cluster.devices_per_node
    fixes: list[Fix] = [{"parallel.dp": actual}]
    if isinstance(per_node, int) and (asserted * at.shards) % per_node == 0:
        fixes.append({"cluster.nodes": asserted * at.shards // per_node})
    if (asserted * at.shards) % at.spec.cluster.nodes == 0:
        fixes.append({"cluster.devices_per_node": asserted * at.shards // at.spec.cluster.nodes})
    yield Broken(
        "parallel.dp",
        f"dp {asserted} is asked for, and a world of {at.world} devices leaves dp {actual} "
        f"({at.world} / tp x pp x cp {at.shards})",
        {"dp": asserted, "derived_dp": actual, "world": at.world, "shards": at.shards},
        tuple(fixes),
    )


@rule("parallel.ep_needs_experts", "Expert parallelism divides experts, so the model has some.")
def ep_needs_experts(at: Situation) -> Iterator[Broken]:
    """All families so far are dense."""
    for axis in ("ep", "etp"):
        degree = getattr(at.spec.parallel, axis)
        if degree is not None and degree > 1:
            yield Broken(
                f"parallel.{axis}",
                f"{axis} {degree} divides experts, and {at.spec.model.name} has none",
                {axis: degree},
                ({f"parallel.{axis}": 1},),
            )


@rule("parallel.expert_world", "The world divides over the expert grid: world = edp x pp x ep x etp.")
def expert_world(at: Situation) -> Iterator[Broken]:
    """Both grids lie over the same ranks."""
    p = at.spec.parallel
    need = p.pp * p.ep * (p.etp or 1)
    if at.world is None or at.world % need == 0 or (p.ep == 1 and (p.etp or 1) == 1):
        return
    yield Broken(
        "parallel.ep",
        f"a world of {at.world} devices does not divide over the expert grid "
        f"of pp {p.pp} x ep {p.ep} x etp {p.etp or 1} = {need}",
        {"world": at.world, "need": need},
        (
            *nearest("parallel.ep", p.ep, lambda n: at.world is not None and at.world % (need // p.ep * n) == 0),
            {"parallel.ep": 1, "parallel.etp": 1},
        ),
    )


@rule("parallel.replicas_by_dp", "Whole copies of the sharded model fit into dp: dp = replicas x shards.")
def replicas_by_dp(at: Situation) -> Iterator[Broken]:
    """HSDP shards within a replica and sums over replicas."""
    replicas, dp = at.spec.parallel.replicas, at.dp
    if dp is not None and dp % replicas:
        yield Broken(
            "parallel.replicas",
            f"dp {dp} does not divide into {replicas} replicas",
            {"dp": dp, "replicas": replicas},
            (*nearest("parallel.replicas", replicas, lambda n: dp % n == 0),),
        )


@rule("parallel.replicas_need_sharding", "Replicas are copies of what is sharded, so something is.")
def replicas_need_sharding(at: Situation) -> Iterator[Broken]:
    """With data_sharding=no_shard every rank is a replica already."""
    p = at.spec.parallel
    if p.data_sharding == "no_shard" and p.replicas > 1:
        yield Broken(
            "parallel.replicas",
            f"replicas {p.replicas} has no meaning with data_sharding=no_shard: every data-parallel rank is one",
            {"replicas": p.replicas},
            ({"parallel.replicas": 1}, {"parallel.data_sharding": "optim"}),
        )


@rule("parallel.heads_by_tp", "Every tensor-parallel rank holds whole query heads.")
def heads_by_tp(at: Situation) -> Iterator[Broken]:
    """Attention is divided by head."""
    yield from _by_tp(at, "heads", "model.num_attention_heads", at.spec.model.num_attention_heads)


@rule("parallel.ffn_by_tp", "The feed-forward width divides over tensor-parallel ranks.")
def ffn_by_tp(at: Situation) -> Iterator[Broken]:
    """Its columns are divided, then its rows."""
    yield from _by_tp(at, "ffn_hidden_size", "model.ffn_hidden_size", at.spec.model.ffn_hidden_size)


@rule("parallel.vocab_by_tp", "The vocabulary divides over tensor-parallel ranks.")
def vocab_by_tp(at: Situation) -> Iterator[Broken]:
    """Embedding and head are divided by row."""
    vocab, tp = at.spec.model.vocab_size, at.spec.parallel.tp
    if vocab is not None and vocab % tp:
        derived = vocab == at.spec.tokenizer.vocab_size and at.spec.tokenizer.path is None
        key = "tokenizer.vocab_size" if derived and at.spec.data.corpus else "model.vocab_size"
        yield Broken(
            "parallel.tp",
            f"a vocabulary of {vocab} does not divide by tp {tp}",
            {"vocab_size": vocab, "tp": tp},
            ({key: -(-vocab // tp) * tp}, *_legal_tp(at)),
        )


@rule("parallel.groups_by_tp", "Key/value heads divide over tp, or tp divides over them.")
def groups_by_tp(at: Situation) -> Iterator[Broken]:
    """With more ranks than key/value heads each head is held by several ranks."""
    groups, tp = at.spec.model.num_query_groups, at.spec.parallel.tp
    if groups is not None and groups % tp and tp % groups:
        yield Broken(
            "parallel.tp",
            f"{groups} key/value heads and tp {tp}: neither divides the other",
            {"num_query_groups": groups, "tp": tp},
            (*_legal_tp(at),),
        )


def _by_tp(at: Situation, name: str, key: str, width: int) -> Iterator[Broken]:
    tp = at.spec.parallel.tp
    if width % tp:
        numbers = {key.partition(".")[2]: width, "tp": tp}
        yield Broken("parallel.tp", f"{name} {width} does not divide by tp {tp}", numbers, (*_legal_tp(at),))


def _legal_tp(at: Situation) -> Iterator[Fix]:
    """Degrees that suit every width of the model and the world, the nearest first."""
    model, p = at.spec.model, at.spec.parallel
    rest = at.shards // p.tp

    def legal(tp: int) -> bool:
        groups = model.num_query_groups or model.num_attention_heads
        widths = (model.num_attention_heads, model.ffn_hidden_size, model.vocab_size or 0)
        return (
            all(width % tp == 0 for width in widths)
            and (groups % tp == 0 or tp % groups == 0)
            and (at.world is None or at.world % rest != 0 or at.world % (rest * tp) == 0)
        )

    return nearest("parallel.tp", p.tp, legal)
