"""Rules of sequence and context parallelism: how the sequence is sharded, and which collective attention uses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


def _exchanges(at: RuleContext) -> tuple[str, ...]:
    """The kinds of exchange that are asked for, each once."""
    exchange = at.spec.parallel.cp_comm_type
    return (exchange,) if isinstance(exchange, str) else tuple(dict.fromkeys(exchange))


@rule("parallel.cp_comm_type_by_layer", "A list of exchanges has one entry for each decoder layer.")
def cp_comm_type_by_layer(at: RuleContext) -> Iterator[Violation]:
    """Each layer looks its own entry up."""
    exchange, layers = at.spec.parallel.cp_comm_type, at.spec.model.num_layers
    if not isinstance(exchange, str) and len(exchange) != layers:
        yield Violation(
            "parallel.cp_comm_type",
            f"cp_comm_type lists {len(exchange)} layers, and the model has {layers}",
            {"entries": len(exchange), "num_layers": layers},
            tuple({"parallel.cp_comm_type": kind} for kind in (*_exchanges(at), "p2p")),
        )


@rule("parallel.cp_comm_type_needs_cp", "A way of exchanging keys is chosen where there are ranks to exchange with.")
def cp_comm_type_needs_cp(at: RuleContext) -> Iterator[Violation]:
    """With cp 1 every rank has all keys, and the choice has no effect."""
    p = at.spec.parallel
    if p.cp == 1 and _exchanges(at) not in (("p2p",), ()):
        yield Violation(
            "parallel.cp_comm_type",
            f"cp_comm_type={'+'.join(_exchanges(at))} has no effect: cp is 1",
            {"cp": 1},
            (
                {"parallel.cp_comm_type": "p2p"},
                {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()},
            ),
            "warning",
        )


@rule("parallel.hierarchical_cp_missing", "An exchange on two levels (a2a+p2p) says how large each is.")
def hierarchical_cp_missing(at: RuleContext) -> Iterator[Violation]:
    """Heads are exchanged within the inner groups (a2a), keys go around between them (p2p)."""
    p = at.spec.parallel
    if p.cp > 1 and "a2a+p2p" in _exchanges(at) and len(p.hierarchical_context_parallel_sizes) != 2:
        said = (
            f"hierarchical_context_parallel_sizes has {len(p.hierarchical_context_parallel_sizes)}"
            if p.hierarchical_context_parallel_sizes
            else "hierarchical_context_parallel_sizes has none"
        )
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            f"a2a+p2p needs two sizes whose product is cp {p.cp}, a2a inside and p2p outside; {said}",
            {"cp": p.cp, "sizes": len(p.hierarchical_context_parallel_sizes)},
            (
                *({"parallel.hierarchical_context_parallel_sizes": pair} for pair in _pairs(p.cp)),
                {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()},
            ),
        )


@rule("parallel.hierarchical_cp_by_cp", "The sizes of a context-parallel hierarchy multiply to cp.")
def hierarchical_cp_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Every rank has one place on each level."""
    p = at.spec.parallel
    whole = math.prod(p.hierarchical_context_parallel_sizes)
    if p.hierarchical_context_parallel_sizes and whole != p.cp:
        fixes: list[Fix] = [{"parallel.hierarchical_context_parallel_sizes": pair} for pair in _pairs(p.cp)]
        fixes += [{"parallel.cp": whole}, {"parallel.hierarchical_context_parallel_sizes": ()}]
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            f"hierarchical_context_parallel_sizes {' x '.join(map(str, p.hierarchical_context_parallel_sizes))} "
            f"= {whole} is not cp {p.cp}",
            {
                "hierarchical_context_parallel_sizes": list(p.hierarchical_context_parallel_sizes),
                "product": whole,
                "cp": p.cp,
            },
            tuple(fixes),
        )


@rule("parallel.hierarchical_cp_unused", "A hierarchy is given for an exchange that has levels.")
def hierarchical_cp_unused(at: RuleContext) -> Iterator[Violation]:
    """Only a2a+p2p reads it."""
    p = at.spec.parallel
    if p.hierarchical_context_parallel_sizes and "a2a+p2p" not in _exchanges(at):
        yield Violation(
            "parallel.hierarchical_context_parallel_sizes",
            "hierarchical_context_parallel_sizes has no effect: "
            f"cp_comm_type is {' and '.join(_exchanges(at)) or 'an empty list'}",
            {"hierarchical_context_parallel_sizes": list(p.hierarchical_context_parallel_sizes)},
            ({"parallel.hierarchical_context_parallel_sizes": ()}, {"parallel.cp_comm_type": "a2a+p2p"}),
            "warning",
        )


def _pairs(cp: int) -> Iterator[tuple[int, int]]:
    """Two sizes above 1 that multiply to cp, small inner ones first."""
    for inner in range(2, min(cp, 65)):
        if cp % inner == 0:
            yield inner, cp // inner


@rule("parallel.heads_by_cp", "An exchange of heads (a2a) gives every context-parallel rank whole heads.")
def heads_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Ulysses attention trades a part of the sequence of all heads for all of the sequence of some heads."""
    p, heads, size = at.spec.parallel, at.spec.model.num_attention_heads, _a2a_size(at)
    if size > 1 and heads % p.tp == 0 and (heads // p.tp) % size:
        yield Violation(
            "parallel.cp_comm_type",
            f"{heads // p.tp} heads of a rank ({heads} / tp {p.tp}) do not divide by the a2a size {size}",
            {"num_attention_heads": heads, "tp": p.tp, "size": size},
            (*_other_exchange(at), *nearest("parallel.cp", p.cp, lambda n: (heads // p.tp) % n == 0)),
        )


@rule("parallel.groups_by_cp", "Key/value heads of a rank divide over an a2a exchange, or it over them.")
def groups_by_cp(at: RuleContext) -> Iterator[Violation]:
    """Key/value heads are exchanged like query heads; fewer of them than ranks are repeated, equally often."""
    model, p, size = at.spec.model, at.spec.parallel, _a2a_size(at)
    groups = model.num_query_groups
    if groups is None or model.mla.kv_lora_rank is not None or size == 1 or (groups % p.tp and p.tp % groups):
        return
    own = max(1, groups // p.tp)
    if own % size and size % own:
        yield Violation(
            "parallel.cp_comm_type",
            f"{own} key/value heads of a rank ({groups} / tp {p.tp}) and the a2a size {size}: "
            "neither divides the other",
            {"num_query_groups": groups, "tp": p.tp, "size": size},
            (*_other_exchange(at), *nearest("parallel.cp", p.cp, lambda n: own % n == 0 or n % own == 0)),
        )


def _a2a_size(at: RuleContext) -> int:
    """Ranks that exchange heads with each other."""
    p, kinds = at.spec.parallel, _exchanges(at)
    inner = (
        p.hierarchical_context_parallel_sizes[0]
        if len(p.hierarchical_context_parallel_sizes) == 2 and math.prod(p.hierarchical_context_parallel_sizes) == p.cp
        else 1
    )
    return max(p.cp if "a2a" in kinds else 1, inner if "a2a+p2p" in kinds else 1)


def _other_exchange(at: RuleContext) -> Iterator[Fix]:
    yield (
        {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()}
        if at.spec.parallel.hierarchical_context_parallel_sizes
        else {"parallel.cp_comm_type": "p2p"}
    )
    yield {"parallel.cp_comm_type": "allgather"}
    if at.spec.parallel.cp_comm_type == "a2a":
        for pair in _pairs(at.spec.parallel.cp):
            yield {"parallel.cp_comm_type": "a2a+p2p", "parallel.hierarchical_context_parallel_sizes": pair}


@rule("parallel.dynamic_cp_needs_cp", "Documents are dealt out by length where there are ranks to deal to.")
def dynamic_cp_needs_cp(at: RuleContext) -> Iterator[Violation]:
    """With cp 1 every rank has its documents whole, and the choice has no effect."""
    if at.spec.parallel.dynamic_context_parallel and at.spec.parallel.cp == 1:
        fixes = ({"parallel.dynamic_context_parallel": False},)
        yield Violation(
            "parallel.dynamic_context_parallel",
            "dynamic_context_parallel has no effect: cp is 1",
            {"cp": 1},
            fixes,
            "warning",
        )


@rule("parallel.dynamic_cp_compile", "Layers are compiled where documents are not dealt out by length.")
def dynamic_cp_compile(at: RuleContext) -> Iterator[Violation]:
    """Every microbatch has documents of its own, and a graph of its own would be compiled for each."""
    p = at.spec.parallel
    if p.dynamic_context_parallel and p.cp > 1 and at.spec.train.compile:
        message = (
            "dynamic_context_parallel attends in other pieces in every microbatch, "
            "and train.compile would compile each anew"
        )
        yield _dynamic(at, message, {}, {"train.compile": False})


@rule("parallel.dynamic_cp_latent", "Context-parallel groups by length are made for ordinary attention.")
def dynamic_cp_latent(at: RuleContext) -> Iterator[Violation]:
    """Latent attention gathers its latent over one fixed group."""
    if at.spec.parallel.dynamic_context_parallel and at.spec.model.mla.kv_lora_rank is not None:
        yield _dynamic(
            at, f"dynamic_context_parallel does not go with the latent attention of {at.spec.model.name}", {}
        )


@rule("parallel.dynamic_cp_dropout", "Dropout is drawn where a rank's row of tokens is of one sample.")
def dynamic_cp_dropout(at: RuleContext) -> Iterator[Violation]:
    """A mask follows from sample and place; a rank that documents are dealt to holds those of any sample."""
    model = at.spec.model
    keys = ("hidden_dropout", "embedding_dropout", "attention_dropout")
    rates = {key: getattr(model, key) for key in keys if getattr(model, key)}
    if at.spec.parallel.dynamic_context_parallel and at.spec.parallel.cp > 1 and rates:
        message = (
            "dynamic_context_parallel mixes samples in a rank's rows, "
            f"and {' and '.join(rates)} draws by sample and position"
        )
        yield _dynamic(at, message, {}, {f"model.{key}": 0.0 for key in rates})


@rule("parallel.dynamic_cp_documents", "Context-parallel groups by length are made for packed documents.")
def dynamic_cp_documents(at: RuleContext) -> Iterator[Violation]:
    """A sample whose attention crosses documents has one length, and one group."""
    if at.spec.parallel.dynamic_context_parallel and not at.spec.data.reset_attention_mask:
        message = (
            "dynamic_context_parallel sorts documents by length, "
            "and data.reset_attention_mask is off: samples are of one length"
        )
        yield _dynamic(at, message, {}, {"data.reset_attention_mask": True})


@rule("parallel.dynamic_cp_comm_type", "Context-parallel groups by length have a way of their own to exchange keys.")
def dynamic_cp_comm_type(at: RuleContext) -> Iterator[Violation]:
    """Keys go straight to the ranks whose queries see them: neither all to all, nor around, nor heads for tokens."""
    others = [kind for kind in _exchanges(at) if kind != "p2p"]
    if at.spec.parallel.dynamic_context_parallel and others:
        message = (
            "dynamic_context_parallel sends keys to the ranks that attend to them, "
            f"and cp_comm_type={'+'.join(others)} would not be followed"
        )
        yield _dynamic(
            at, message, {}, {"parallel.cp_comm_type": "p2p", "parallel.hierarchical_context_parallel_sizes": ()}
        )


def _dynamic(at: RuleContext, message: str, numbers: dict[str, int], *fixes: Fix) -> Violation:
    return Violation(
        "parallel.dynamic_context_parallel", message, numbers, (*fixes, {"parallel.dynamic_context_parallel": False})
    )


@rule("parallel.sequence_by_cp", "A sequence divides into 2 x cp chunks, two for each context-parallel rank.")
def sequence_by_cp(at: RuleContext) -> Iterator[Violation]:
    """A causal mask is balanced by giving each rank one early and one late chunk."""
    length, cp = at.spec.batch.sequence_length, at.spec.parallel.cp
    if cp > 1 and length % (2 * cp):
        yield Violation(
            "parallel.cp",
            f"sequence_length {length} does not divide into 2 x cp {cp} = {2 * cp} chunks",
            {"sequence_length": length, "cp": cp},
            (
                *multiples("batch.sequence_length", length, 2 * cp),
                *nearest("parallel.cp", cp, lambda n: n == 1 or length % (2 * n) == 0),
            ),
        )


@rule("parallel.sequence_by_tp", "With sequence parallelism a rank's sequence divides over tp.")
def sequence_by_tp(at: RuleContext) -> Iterator[Violation]:
    """What context parallelism leaves of the sequence is divided once more."""
    p, length = at.spec.parallel, at.spec.batch.sequence_length
    if p.sequence_parallel and p.tp > 1 and length % p.cp == 0 and (length // p.cp) % p.tp:
        yield Violation(
            "parallel.sequence_parallel",
            f"a rank's sequence of {length // p.cp} does not divide by tp {p.tp}",
            {"sequence_length": length, "cp": p.cp, "tp": p.tp},
            (
                *multiples("batch.sequence_length", length, 2 * p.cp * p.tp),
                {"parallel.sequence_parallel": False},
            ),
        )
