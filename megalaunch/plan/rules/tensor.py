"""Rules of tensor parallelism: every width that it divides, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


@rule("parallel.heads_by_tp", "Every tensor-parallel rank holds whole query heads.")
def heads_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Attention is divided by head: a head's scores need all of its width."""
    yield from _by_tp(at, "heads", "model.num_attention_heads", at.spec.model.num_attention_heads)


@rule("parallel.ffn_by_tp", "The feed-forward width divides over tensor-parallel ranks.")
def ffn_by_tp(at: RuleContext) -> Iterator[Violation]:
    """The columns of the first matrix are divided, and the rows of the second to match."""
    if at.has_dense_layers:
        yield from _by_tp(at, "ffn_hidden_size", "model.ffn_hidden_size", at.spec.model.ffn_hidden_size, wider=True)


@rule("parallel.shared_ffn_by_tp", "The width of the shared experts divides over tensor-parallel ranks.")
def shared_ffn_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Shared experts see every token, so they are divided as a dense block is."""
    width = at.spec.model.moe.shared_ffn_hidden_size
    if at.has_experts:
        yield from _by_tp(at, "moe.shared_ffn_hidden_size", "model.moe.shared_ffn_hidden_size", width, wider=True)


@rule("parallel.expert_ffn_by_etp", "The width of an expert divides over expert-tensor-parallel ranks.")
def expert_ffn_by_etp(at: RuleContext) -> Iterator[Violation]:
    """etp divides the matrices of each routed expert."""
    moe, etp = at.spec.model.moe, at.spec.parallel.etp or 1
    width = moe.ffn_hidden_size or at.spec.model.ffn_hidden_size
    if at.has_experts and width % etp:
        yield Violation(
            "parallel.etp",
            f"moe.ffn_hidden_size {width} does not divide by etp {etp}",
            {"ffn_hidden_size": width, "etp": etp},
            (
                *nearest("parallel.etp", etp, lambda n: width % n == 0),
                *multiples("model.moe.ffn_hidden_size", width, etp),
            ),
        )


@rule("parallel.vocab_by_tp", "A vocabulary that does not divide over tensor-parallel ranks is padded.")
def vocab_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Embedding and head are divided by row. Padded rows count in no loss, and no checkpoint or export has them."""
    vocab, tp = at.spec.model.vocab_size, at.spec.parallel.tp
    if vocab is not None and vocab % tp:
        rows = vocabulary_rows(vocab, tp)
        yield Violation(
            "parallel.tp",
            f"a vocabulary of {vocab:,} does not divide by tp {tp}: embedding and head are padded to {rows:,} rows",
            {"vocab_size": vocab, "tp": tp, "rows": rows},
            severity="note",
        )


@rule("parallel.groups_by_tp", "Key/value heads divide over tp, or tp divides over them.")
def groups_by_tp(at: RuleContext) -> Iterator[Violation]:
    """With more ranks than key/value heads each head is held by several ranks, equally many."""
    groups, tp = at.spec.model.num_query_groups, at.spec.parallel.tp
    if groups is not None and groups % tp and tp % groups:
        yield Violation(
            "parallel.tp",
            f"{groups} key/value heads and tp {tp}: neither divides the other",
            {"num_query_groups": groups, "tp": tp},
            (*_legal_tp(at),),
        )


@rule("parallel.copied_groups", "A key/value head lies on one tensor-parallel rank.")
def copied_groups(at: RuleContext) -> Iterator[Violation]:
    """With more ranks than key/value heads their projections are copied, and the copies' gradients summed."""
    model, tp = at.spec.model, at.spec.parallel.tp
    groups = model.num_query_groups
    if groups is not None and model.mla.kv_lora_rank is None and tp > groups and tp % groups == 0:
        yield Violation(
            "parallel.tp",
            f"tp {tp} is more than {groups} key/value heads: each is held by {tp // groups} ranks",
            {"tp": tp, "num_query_groups": groups, "copies": tp // groups},
            ({"parallel.tp": groups},),
            "note",
        )


@rule("parallel.sp_needs_tp", "Sequence parallelism lives between tensor-parallel regions, so tp is above 1.")
def sp_needs_tp(at: RuleContext) -> Iterator[Violation]:
    """With tp 1 there is no one to share a sequence with."""
    p = at.spec.parallel
    if p.sequence_parallel and p.tp == 1:
        yield Violation(
            "parallel.sequence_parallel",
            "sequence_parallel shares a sequence among tensor-parallel ranks, and tp is 1",
            {"tp": 1},
            ({"parallel.sequence_parallel": False},),
        )


@rule("parallel.tp_comm_overlap_needs_sp", "Tensor-parallel overlap hides the exchanges of sequence parallelism.")
def tp_comm_overlap_needs_sp(at: RuleContext) -> Iterator[Violation]:
    """It pipelines all-gather and reduce-scatter with their matmuls; without sequence parallelism there are none."""
    p = at.spec.parallel
    if p.tp_comm_overlap and not p.sequence_parallel:
        yield Violation(
            "parallel.tp_comm_overlap",
            "tp_comm_overlap runs the all-gathers and reduce-scatters of sequence parallelism beside their matmuls, "
            "and sequence_parallel is off",
            {"tp": p.tp},
            ({"parallel.tp_comm_overlap": False}, {"parallel.sequence_parallel": True}),
        )


def _by_tp(at: RuleContext, name: str, key: str, width: int, wider: bool = False) -> Iterator[Violation]:
    """`wider`: another width is a fix too, where no other degree is."""
    tp = at.spec.parallel.tp
    if width % tp:
        numbers = {key.rpartition(".")[2]: width, "tp": tp}
        fixes = (*_legal_tp(at), *(multiples(key, width, tp) if wider else ()))
        yield Violation("parallel.tp", f"{name} {width} does not divide by tp {tp}", numbers, fixes)


def _legal_tp(at: RuleContext) -> Iterator[Fix]:
    """Degrees that suit every width of the model and the world, the nearest first."""
    model, p = at.spec.model, at.spec.parallel
    rest = at.model_parallel_size // p.tp
    groups = model.num_query_groups or model.num_attention_heads
    widths = [model.num_attention_heads]
    widths += [model.ffn_hidden_size] if at.has_dense_layers else []
    widths += [model.moe.shared_ffn_hidden_size] if at.has_experts else []

    def legal(tp: int) -> bool:
        return (
            all(width % tp == 0 for width in widths)
            and (groups % tp == 0 or tp % groups == 0)
            and (at.world is None or at.world % rest != 0 or at.world % (rest * tp) == 0)
        )

    return nearest("parallel.tp", p.tp, legal)
