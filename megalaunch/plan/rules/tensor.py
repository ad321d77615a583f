"""Rules of tensor parallelism: every width that is sharded over tp, and the settings that need tp."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


@rule("parallel.heads_by_tp", "num_attention_heads is divisible by tp.")
def heads_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Attention is sharded by head: the scores of a head need its full width."""
    yield from _by_tp(at, "heads", "model.num_attention_heads", at.spec.model.num_attention_heads)


@rule("parallel.ffn_by_tp", "ffn_hidden_size is divisible by tp.")
def ffn_by_tp(at: RuleContext) -> Iterator[Violation]:
    """The first matrix of the feed-forward block is column parallel, the second one row parallel."""
    if at.has_dense_layers:
        yield from _by_tp(at, "ffn_hidden_size", "model.ffn_hidden_size", at.spec.model.ffn_hidden_size, wider=True)


@rule("parallel.shared_ffn_by_tp", "moe.shared_ffn_hidden_size is divisible by tp.")
def shared_ffn_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Shared experts process every token, so they are sharded like a dense feed-forward block."""
    width = at.spec.model.moe.shared_ffn_hidden_size
    if at.has_experts:
        yield from _by_tp(at, "moe.shared_ffn_hidden_size", "model.moe.shared_ffn_hidden_size", width, wider=True)


@rule("parallel.expert_ffn_by_etp", "moe.ffn_hidden_size is divisible by etp.")
def expert_ffn_by_etp(at: RuleContext) -> Iterator[Violation]:
    """etp shards the matrices of each routed expert."""
    moe, etp = at.spec.model.moe, at.spec.parallel.etp or 1
    width = moe.ffn_hidden_size or at.spec.model.ffn_hidden_size
    if at.has_experts and width % etp:
        yield Violation(
            "parallel.etp",
            f"moe.ffn_hidden_size {width} is not divisible by etp {etp}",
            {"ffn_hidden_size": width, "etp": etp},
            (
                *nearest("parallel.etp", etp, lambda n: width % n == 0),
                *multiples("model.moe.ffn_hidden_size", width, etp),
            ),
        )


@rule("parallel.vocab_by_tp", "A vocabulary that is not divisible by tp is padded.")
def vocab_by_tp(at: RuleContext) -> Iterator[Violation]:
    """Embedding and head are sharded by row. Padded rows are excluded from the loss, checkpoints and exports."""
    vocab, tp = at.spec.model.vocab_size, at.spec.parallel.tp
    if vocab is not None and vocab % tp:
        rows = vocabulary_rows(vocab, tp)
        yield Violation(
            "parallel.tp",
            f"a vocabulary of {vocab:,} is not divisible by tp {tp}: embedding and head are padded to {rows:,} rows",
            {"vocab_size": vocab, "tp": tp, "rows": rows},
            severity="note",
        )


@rule("parallel.groups_by_tp", "num_query_groups is divisible by tp, or tp by num_query_groups.")
def groups_by_tp(at: RuleContext) -> Iterator[Violation]:
    """With more ranks than key/value heads each head is replicated on equally many ranks."""
    groups, tp = at.spec.model.num_query_groups, at.spec.parallel.tp
    if groups is not None and groups % tp and tp % groups:
        yield Violation(
            "parallel.tp",
            f"neither num_query_groups {groups} nor tp {tp} is divisible by the other",
            {"num_query_groups": groups, "tp": tp},
            (*_legal_tp(at),),
        )


@rule("parallel.copied_groups", "Key/value heads are not replicated over tensor-parallel ranks.")
def copied_groups(at: RuleContext) -> Iterator[Violation]:
    """With tp above num_query_groups their projections are replicated, and the replicas' gradients all-reduced."""
    model, tp = at.spec.model, at.spec.parallel.tp
    groups = model.num_query_groups
    if groups is not None and model.mla.kv_lora_rank is None and tp > groups and tp % groups == 0:
        yield Violation(
            "parallel.tp",
            f"tp {tp} is above num_query_groups {groups}: each key/value head is replicated on {tp // groups} ranks",
            {"tp": tp, "num_query_groups": groups, "copies": tp // groups},
            ({"parallel.tp": groups},),
            "note",
        )


@rule("parallel.sp_needs_tp", "sequence_parallel is on only with tp above 1.")
def sp_needs_tp(at: RuleContext) -> Iterator[Violation]:
    """Sequence parallelism shards activations between tensor-parallel regions over the tp ranks."""
    p = at.spec.parallel
    if p.sequence_parallel and p.tp == 1:
        yield Violation(
            "parallel.sequence_parallel",
            "sequence_parallel shards activations over tensor-parallel ranks, but tp is 1",
            {"tp": 1},
            ({"parallel.sequence_parallel": False},),
        )


@rule("parallel.tp_comm_overlap_needs_sp", "tp_comm_overlap is on only with sequence_parallel.")
def tp_comm_overlap_needs_sp(at: RuleContext) -> Iterator[Violation]:
    """It pipelines all-gather and reduce-scatter with their matmuls; without sequence parallelism there are none."""
    p = at.spec.parallel
    if p.tp_comm_overlap and not p.sequence_parallel:
        yield Violation(
            "parallel.tp_comm_overlap",
            "tp_comm_overlap overlaps the all-gathers and reduce-scatters of sequence parallelism with matmuls, "
            "but sequence_parallel is off",
            {"tp": p.tp},
            ({"parallel.tp_comm_overlap": False}, {"parallel.sequence_parallel": True}),
        )


def _by_tp(at: RuleContext, name: str, key: str, width: int, wider: bool = False) -> Iterator[Violation]:
    """Yield a violation if `width` is not divisible by tp; `wider`: offer other widths as fixes too."""
    tp = at.spec.parallel.tp
    if width % tp:
        numbers = {key.rpartition(".")[2]: width, "tp": tp}
        fixes = (*_legal_tp(at), *(multiples(key, width, tp) if wider else ()))
        yield Violation("parallel.tp", f"{name} {width} is not divisible by tp {tp}", numbers, fixes)


def _legal_tp(at: RuleContext) -> Iterator[Fix]:
    """Yield the degrees that divide every width of the model and the world, the nearest first."""
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
