"""The layouts that a search looks at: degrees, divisions of the layers, and what is tried within each.

The world's divisors bound every degree; what does not fit together is left to the rules, which say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.parallel import DataSharding, ParallelSpec
from megalaunch.config.schema.recompute import RecomputeModule, RecomputeSpec

SHORTEST_PART = 512  # tokens of a sequence that a context-parallel rank holds, at least
LARGEST_MICRO_BATCH = 8
MOST_VIRTUAL_STAGES = (
    12  # the most that published runs use; the cost of a message, which grows with them, is not modelled
)


@dataclass(frozen=True)
class LayerSplit:
    """How layers are shared out: over virtual stages, with ends that count as layers or hold fewer of them."""

    vpp: int | None = None
    embedding: bool = False
    head: bool = False
    first: int | None = None
    last: int | None = None
    layout: str | None = None

    @property
    def interleaved(self) -> bool:
        """Whether ranks hold several virtual stages; the layouts tried here always do."""
        return self.vpp is not None or self.layout is not None


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def grids(spec: RunSpec, world: int, per_node: int) -> Iterator[RunSpec]:
    """The spec under every combination of degrees; pp as far as there are layers, tp within a machine."""
    model = spec.model
    longest = max(1, spec.batch.sequence_length // SHORTEST_PART)
    experts = model.moe.num_experts
    for tp in divisors(per_node):
        for pp in (n for n in divisors(world) if n <= model.num_layers):
            for cp in (n for n in divisors(world) if n <= longest):
                for ep in (n for n in divisors(experts or 1) if n <= world // pp):
                    for etp in (None,) if experts is None else {1, tp}:
                        yield _gridded(spec, world, tp, pp, cp, ep, etp)


def _gridded(spec: RunSpec, world: int, tp: int, pp: int, cp: int, ep: int, etp: int | None) -> RunSpec:
    """The spec under these degrees; what only makes sense with the degrees that it had goes back to its default."""
    p = spec.parallel
    dp, rest = divmod(world, tp * pp * cp)
    parallel = replace(
        _even_split(p),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=None if rest or not dp else dp,
        dp_replicate=1,
        sequence_parallel=tp > 1,
        tp_comm_overlap=p.tp_comm_overlap and tp > 1,
        cp_comm_type=p.cp_comm_type if cp > 1 and p.cp_comm_type in ("p2p", "a2a", "allgather") else "p2p",
        hierarchical_context_parallel_sizes=(),
        microbatch_group_size_per_vp_stage=None,
    )
    return replace(spec, parallel=parallel)


def _even_split(parallel: ParallelSpec) -> ParallelSpec:
    return replace(
        parallel,
        vpp=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_layout=None,
        overlap_p2p_comm=False,
    )


def split_layers(spec: RunSpec, division: LayerSplit, sharding: DataSharding) -> RunSpec:
    """The spec with its layers shared out so, and its states sharded so."""
    schedule = spec.parallel.schedule
    if schedule in ("auto", "1f1b", "interleaved"):  # what auto comes to
        schedule = "auto" if spec.parallel.pp == 1 else "interleaved" if division.interleaved else "1f1b"
    parallel = replace(
        spec.parallel,
        schedule=schedule,
        data_sharding=sharding,
        vpp=division.vpp,
        account_for_embedding_in_pipeline_split=division.embedding,
        account_for_loss_in_pipeline_split=division.head,
        num_layers_in_first_pipeline_stage=division.first,
        num_layers_in_last_pipeline_stage=division.last,
        pipeline_layout=division.layout,
        overlap_p2p_comm=division.interleaved,
    )
    return replace(spec, parallel=parallel)


@cache
def pipeline_splits(layers: int, mtp: int, pp: int) -> tuple[LayerSplit, ...]:
    """Even shares, with the ends counted as layers or not; where there are none, ends that hold fewer layers.

    `mtp` counts depths of multi-token prediction, which stay with the head.
    """
    if pp == 1:
        return (LayerSplit(),)
    found: list[LayerSplit] = []
    for embedding, head in ((False, False), (True, True), (False, True)):
        share, rest = divmod(layers + embedding + head, pp)
        if not rest and share:
            found += [LayerSplit(vpp, embedding, head) for vpp in _virtual(share)]
    return tuple(found) or (*_uneven(layers, pp), *_layouts(layers, mtp, pp))


def _virtual(*shares: int) -> Iterator[int | None]:
    yield None
    degrees = (n for n in divisors(shares[0]) if 1 < n <= MOST_VIRTUAL_STAGES)
    yield from (n for n in degrees if all(share % n == 0 for share in shares))


def _uneven(layers: int, pp: int) -> Iterator[LayerSplit]:
    """Middle ranks of one size, ends of what is left: the last no larger than the first, as it has the head."""
    if pp == 2:
        yield LayerSplit(last=layers // 2)
        return
    for middle in range(-(-layers // pp), layers // (pp - 2) + 1):
        left = layers - middle * (pp - 2)
        lasts = [last for last in (left // 2, left // 2 - 1) if last >= 1 and left - last <= middle]
        for last in lasts:  # one fewer makes room for the head
            first = left - last
            yield from (LayerSplit(vpp, first=first, last=last) for vpp in _virtual(first, last, middle))
        if lasts:
            return


def _layouts(layers: int, mtp: int, pp: int) -> Iterator[LayerSplit]:
    """Virtual stages written out: embedding, layers, depths and head in parts of one size, the middle's one larger."""
    units = "E" + "t" * layers + "m" * mtp + "L"
    for vpp in (2, 4):
        size, over = divmod(len(units), pp * vpp)
        if size < max(1, mtp + 1):
            return
        ends = [size + (1 <= stage <= over) for stage in range(pp * vpp)]
        starts = [sum(ends[:stage]) for stage in range(pp * vpp)]
        yield LayerSplit(layout="|".join(units[start : start + n] for start, n in zip(starts, ends, strict=True)))


def shardings(spec: RunSpec) -> tuple[DataSharding, ...]:
    """What data-parallel ranks divide; a pipeline keeps gradients and copies whole whatever they do."""
    p = spec.parallel
    if (p.dp or 1) * p.cp == 1 or p.pp > 1:
        return ("optim",)
    return ("optim", "optim_grads", "optim_grads_params")


def micro_batches(spec: RunSpec) -> Iterator[int]:
    """Powers of two that a rank's share of the batch has."""
    share = spec.batch.global_batch_size // (spec.parallel.dp or 1)
    size = 1
    while size <= min(LARGEST_MICRO_BATCH, share):
        yield size
        size *= 2


def recomputations(spec: RunSpec) -> tuple[RecomputeSpec, ...]:
    """From nothing to whole layers: each keeps less than the one before, and computes more again."""
    heavy: RecomputeModule = "mlp" if spec.model.moe.num_experts is None else "moe"
    none = replace(spec.recompute, granularity="none", method="uniform", num_layers=1, cpu_offloading_num_layers=0)
    return (
        none,
        replace(none, granularity="selective", modules=("norm", "activation")),
        replace(none, granularity="selective", modules=("norm", heavy)),
        replace(none, granularity="full"),
    )
