"""Rules of sequence and context parallelism: how the sequence is sharded, and which collective attention uses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


def _comm_types(at: RuleContext) -> tuple[str, ...]:
    """Return the distinct communication types of the layers."""
    types = at.spec.parallel.cp_comm_type
    return (types,) if isinstance(types, str) else tuple(dict.fromkeys(types))


@rule("parallel.cp_comm_type_by_layer", "A cp_comm_type list has one entry per decoder layer.")
def cp_comm_type_by_layer(at: RuleContext) -> Iterator[Violation]:
    """Each layer uses its own entry."""
    types, layers = at.spec.parallel.cp_comm_type, at.spec.model.num_layers
    if not isinstance(types, str) and len(types) != layers:
        yield Violation(
            "parallel.cp_comm_type",
            f"cp_comm_type has {len(types)} entries, but the model has {layers} layers",
            {"entries": len(types), "num_layers": layers},
            tuple({"parallel.cp_comm_type": kind} for kind in (*_comm_types(at), "p2p")),
        )


@rule("parallel.cp_comm_type_needs_cp", "cp_comm_type is set only with cp above 1.")
def cp_comm_type_needs_cp(at: RuleContext) -> Iterator[Violation]:
    """With cp 1 every rank has all keys, so the setting has no effect."""
    p = at.spec.parallel
    if p.cp == 1 and _comm_types(at) not in (("p2p",), ()):
        yield Violation(
            "parallel.cp_comm_type",
            f"cp_comm_type={'+'.join(_comm_types(at))} has no effect: cp is 1",
            {"cp": 1},
            (
                {"parallel.cp_comm_type": "p2p"},
                {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()},
            ),
            "warning",
        )


@rule("parallel.hierarchical_cp_missing", "cp_comm_type=a2a+p2p has two hierarchical_context_parallel_sizes.")
def hierarchical_cp_missing(at: RuleContext) -> Iterator[Violation]:
    """All-to-all of heads (a2a) runs within the inner groups, ring attention (p2p) between them."""
    p = at.spec.parallel
    if p.cp > 1 and "a2a+p2p" in _comm_types(at) and len(p.hierarchical_context_parallel_sizes) != 2:
        count = len(p.hierarchical_context_parallel_sizes)
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            f"cp_comm_type=a2a+p2p needs two hierarchical_context_parallel_sizes (a2a, p2p) with product cp {p.cp}, "
            f"but there {'is' if count == 1 else 'are'} {count}",
            {"cp": p.cp, "sizes": count},
            (
                *({"parallel.hierarchical_context_parallel_sizes": pair} for pair in _pairs(p.cp)),
                {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()},
            ),
        )


@rule("parallel.hierarchical_cp_by_cp", "The product of hierarchical_context_parallel_sizes is cp.")
def hierarchical_cp_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Every context-parallel rank has one coordinate on each level."""
    p = at.spec.parallel
    product = math.prod(p.hierarchical_context_parallel_sizes)
    if p.hierarchical_context_parallel_sizes and product != p.cp:
        fixes: list[Fix] = [{"parallel.hierarchical_context_parallel_sizes": pair} for pair in _pairs(p.cp)]
        fixes += [{"parallel.cp": product}, {"parallel.hierarchical_context_parallel_sizes": ()}]
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            f"hierarchical_context_parallel_sizes {' x '.join(map(str, p.hierarchical_context_parallel_sizes))} "
            f"= {product} is not cp {p.cp}",
            {
                "hierarchical_context_parallel_sizes": list(p.hierarchical_context_parallel_sizes),
                "product": product,
                "cp": p.cp,
            },
            tuple(fixes),
        )


@rule("parallel.hierarchical_cp_unused", "hierarchical_context_parallel_sizes is set only for cp_comm_type=a2a+p2p.")
def hierarchical_cp_unused(at: RuleContext) -> Iterator[Violation]:
    """Other types have no hierarchy, so the setting has no effect."""
    p = at.spec.parallel
    if p.hierarchical_context_parallel_sizes and "a2a+p2p" not in _comm_types(at):
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            "hierarchical_context_parallel_sizes has no effect: "
            f"cp_comm_type is {' and '.join(_comm_types(at)) or 'an empty list'}",
            {"hierarchical_context_parallel_sizes": list(p.hierarchical_context_parallel_sizes)},
            ({"parallel.hierarchical_context_parallel_sizes": ()}, {"parallel.cp_comm_type": "a2a+p2p"}),
            "warning",
        )


def _pairs(cp: int) -> Iterator[tuple[int, int]]:
    """Yield two sizes above 1 whose product is cp, small inner ones first."""
    for inner in range(2, min(cp, 65)):
        if cp % inner == 0:
            yield inner, cp // inner


@rule("parallel.heads_by_cp", "The query heads of a rank are divisible by the a2a size.")
def heads_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Ulysses shards heads inside attention and the sequence outside of it, with an all-to-all between the two."""
    p, heads, size = at.spec.parallel, at.spec.model.num_attention_heads, _a2a_size(at)
    if size > 1 and heads % p.tp == 0 and (heads // p.tp) % size:
        yield Violation(
            "parallel.cp_comm_type",
            f"{heads // p.tp} heads per rank ({heads} / tp {p.tp}) are not divisible by the a2a size {size}",
            {"num_attention_heads": heads, "tp": p.tp, "size": size},
            (*_other_comm_types(at), *nearest("parallel.cp", p.cp, lambda n: (heads // p.tp) % n == 0)),
        )


@rule("parallel.groups_by_cp", "The key/value heads of a rank are divisible by the a2a size, or the a2a size by them.")
def groups_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Key/value heads take part in the all-to-all; fewer heads than ranks are repeated equally often."""
    model, p, size = at.spec.model, at.spec.parallel, _a2a_size(at)
    groups = model.num_query_groups
    if groups is None or model.mla.kv_lora_rank is not None or size == 1 or (groups % p.tp and p.tp % groups):
        return
    own = max(1, groups // p.tp)
    if own % size and size % own:
        yield Violation(
            "parallel.cp_comm_type",
            f"neither {own} key/value heads per rank ({groups} / tp {p.tp}) nor the a2a size {size} "
            "is divisible by the other",
            {"num_query_groups": groups, "tp": p.tp, "size": size},
            (*_other_comm_types(at), *nearest("parallel.cp", p.cp, lambda n: own % n == 0 or n % own == 0)),
        )


def _a2a_size(at: RuleContext) -> int:
    """Return the ranks of an all-to-all of heads."""
    p, kinds = at.spec.parallel, _comm_types(at)
    inner = (
        p.hierarchical_context_parallel_sizes[0]
        if len(p.hierarchical_context_parallel_sizes) == 2 and math.prod(p.hierarchical_context_parallel_sizes) == p.cp
        else 1
    )
    return max(p.cp if "a2a" in kinds else 1, inner if "a2a+p2p" in kinds else 1)


def _other_comm_types(at: RuleContext) -> Iterator[Fix]:
    yield (
        {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()}
        if at.spec.parallel.hierarchical_context_parallel_sizes
        else {"parallel.cp_comm_type": "p2p"}
    )
    yield {"parallel.cp_comm_type": "allgather"}
    if at.spec.parallel.cp_comm_type == "a2a":
        for pair in _pairs(at.spec.parallel.cp):
            yield {"parallel.cp_comm_type": "a2a+p2p", "parallel.hierarchical_context_parallel_sizes": pair}


@rule("parallel.dynamic_cp_needs_cp", "dynamic_context_parallel is on only with cp above 1.")
def dynamic_cp_needs_cp(at: RuleContext) -> Iterator[Violation]:
    """With cp 1 every rank has complete documents, so the setting has no effect."""
    if at.spec.parallel.dynamic_context_parallel and at.spec.parallel.cp == 1:
        fixes = ({"parallel.dynamic_context_parallel": False},)
        yield Violation(
            "parallel.dynamic_context_parallel",
            "dynamic_context_parallel has no effect: cp is 1",
            {"cp": 1},
            fixes,
            "warning",
        )


@rule("parallel.dynamic_cp_compile", "train.compile is off with dynamic_context_parallel.")
def dynamic_cp_compile(at: RuleContext) -> Iterator[Violation]:
    """Every microbatch has other document lengths, so a graph would be compiled for each."""
    p = at.spec.parallel
    if p.dynamic_context_parallel and p.cp > 1 and at.spec.train.compile:
        message = (
            "dynamic_context_parallel changes the attention shapes in every microbatch, "
            "and train.compile would recompile for each"
        )
        yield _dynamic(at, message, {}, {"train.compile": False})


@rule("parallel.dynamic_cp_router", "With dynamic_context_parallel nothing in a router depends on samples.")
def dynamic_cp_router(at: RuleContext) -> Iterator[Violation]:
    """With documents assigned by length a rank has tokens of several samples, without their positions in them."""
    moe = at.spec.model.moe
    off: dict[str, object] = {}
    if moe.balance_loss == "sequence":
        off["balance_loss"] = "batch"
    if moe.choice == "sinkhorn":
        off["choice"] = "scores"
    if moe.capacity_factor is not None:
        off |= {"capacity_factor": None, "drop_policy": "probs", "pad_to_capacity": False}
    if at.spec.parallel.dynamic_context_parallel and at.spec.parallel.cp > 1 and at.has_experts and off:
        keys = " and ".join(f"moe.{key}" for key in off if key not in ("drop_policy", "pad_to_capacity"))
        message = f"dynamic_context_parallel mixes samples on a rank, but {keys} needs to know the sample of a token"
        yield _dynamic(at, message, {}, {f"model.moe.{key}": value for key, value in off.items()})


@rule("parallel.dynamic_cp_documents", "data.reset_attention_mask is on with dynamic_context_parallel.")
def dynamic_cp_documents(at: RuleContext) -> Iterator[Violation]:
    """Without it attention crosses documents, and every sample has the same length."""
    if at.spec.parallel.dynamic_context_parallel and not at.spec.data.reset_attention_mask:
        message = (
            "dynamic_context_parallel assigns documents by length, "
            "but data.reset_attention_mask is off: all samples have one length"
        )
        yield _dynamic(at, message, {}, {"data.reset_attention_mask": True})


@rule("parallel.dynamic_cp_comm_type", "With dynamic_context_parallel cp_comm_type has its default, p2p.")
def dynamic_cp_comm_type(at: RuleContext) -> Iterator[Violation]:
    """Keys and values are sent to the ranks whose queries attend to them, so cp_comm_type is not used."""
    others = [kind for kind in _comm_types(at) if kind != "p2p"]
    if at.spec.parallel.dynamic_context_parallel and others:
        message = (
            "dynamic_context_parallel sends keys to the ranks that attend to them, "
            f"and does not use cp_comm_type={'+'.join(others)}"
        )
        yield _dynamic(
            at, message, {}, {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()}
        )


def _dynamic(at: RuleContext, message: str, numbers: dict[str, int], *fixes: Fix) -> Violation:
    return Violation(
        "parallel.dynamic_context_parallel", message, numbers, (*fixes, {"parallel.dynamic_context_parallel": False})
    )


@rule("parallel.sequence_by_cp", "sequence_length is divisible by 2 x cp.")
def sequence_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Each context-parallel rank gets one early and one late chunk, which balances the causal mask."""
    length, cp = at.spec.batch.sequence_length, at.spec.parallel.cp
    if cp > 1 and length % (2 * cp):
        yield Violation(
            "parallel.cp",
            f"sequence_length {length} is not divisible by 2 x cp {cp} = {2 * cp}",
            {"sequence_length": length, "cp": cp},
            (
                *multiples("batch.sequence_length", length, 2 * cp),
                *nearest("parallel.cp", cp, lambda n: n == 1 or length % (2 * n) == 0),
            ),
        )


@rule("parallel.sequence_by_tp", "With sequence_parallel, sequence_length / cp is divisible by tp.")
def sequence_by_tp(at: RuleContext) -> Iterator[Violation]:
    """The sequence shard of a context-parallel rank is sharded again over tp."""
    p, length = at.spec.parallel, at.spec.batch.sequence_length
    if p.sequence_parallel and p.tp > 1 and length % p.cp == 0 and (length // p.cp) % p.tp:
        yield Violation(
            "parallel.sequence_parallel",
            f"a rank's sequence of {length // p.cp} is not divisible by tp {p.tp}",
            {"sequence_length": length, "cp": p.cp, "tp": p.tp},
            (
                *multiples("batch.sequence_length", length, 2 * p.cp * p.tp),
                {"parallel.sequence_parallel": False},
            ),
        )
