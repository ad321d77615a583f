"""The search space of layouts: degrees, splits of the layers, sharding, micro batches and recomputation.

Every degree divides the world or the node; invalid combinations are left to the rules, which have the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megalaunch.plan.stage_params import ACTIVE_CHUNKS
from megalaunch.plan.world import data_parallel_size, site_size
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import DataSharding, ParallelSpec
from megalaunch.schema.recompute import RecomputeModule, RecomputeSpec

SHORTEST_PART = 512  # minimum tokens of a sequence per context-parallel rank
LARGEST_MICRO_BATCH = 8
MOST_VIRTUAL_STAGES = 12  # the most in published runs; the latency of messages, which grows with it, is not modelled


@dataclass(frozen=True)
class LayerSplit:
    """A split of layers over virtual stages, with ends that count as layers or hold fewer of them."""

    vpp: int | None = None
    embedding: bool = False
    head: bool = False
    first: int | None = None
    last: int | None = None
    layout: str | None = None

    def chunks(self, pp: int) -> int:
        """Return the virtual stages of a rank."""
        return self.vpp or ((self.layout.count("|") + 1) // pp if self.layout else 1)

    @property
    def interleaved(self) -> bool:
        """Whether ranks hold several virtual stages; the pipeline layouts of this space always do."""
        return self.vpp is not None or self.layout is not None


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def grids(spec: RunSpec, world: int, per_node: int) -> Iterator[RunSpec]:
    """Yield the spec with every combination of degrees; pp is at most the number of layers, tp within a node."""
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
    """Return the spec with these degrees; settings that depend on its former degrees are reset to their defaults.

    Replicas that train apart (outer_steps) stay: another number of them is another training.
    """
    p = spec.parallel
    parallel = replace(
        _even_split(p),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp_replicate=p.dp_replicate if p.outer_steps else 1,
        sequence_parallel=True if tp > 1 else p.sequence_parallel and None,  # a run's False stays, as its equal
        tp_comm_overlap=p.tp_comm_overlap and tp > 1,
        cp_comm_type=p.cp_comm_type if cp > 1 and p.cp_comm_type in ("p2p", "a2a", "allgather") else "p2p",
        hierarchical_context_parallel_sizes=(),
        microbatch_group_size_per_vp_stage=None,
    )
    return replace(spec, parallel=replace(parallel, dp=data_parallel_size(world, parallel)))


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


def split_layers(spec: RunSpec, split: LayerSplit, sharding: DataSharding, replicas: int) -> RunSpec:
    """Return the spec with a split of its layers and a sharding of its states within each of `replicas` replicas."""
    schedule = spec.parallel.schedule
    if schedule in ("auto", "1f1b", "interleaved"):  # the choices of auto
        schedule = "auto" if spec.parallel.pp == 1 else "interleaved" if split.interleaved else "1f1b"
    parallel = replace(
        spec.parallel,
        schedule=schedule,
        data_sharding=sharding,
        dp_replicate=replicas,
        vpp=split.vpp,
        account_for_embedding_in_pipeline_split=split.embedding,
        account_for_loss_in_pipeline_split=split.head,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        pipeline_layout=split.layout,
        overlap_p2p_comm=split.interleaved,
    )
    return replace(spec, parallel=parallel)


@cache
def pipeline_splits(layers: int, mtp: int, pp: int) -> tuple[LayerSplit, ...]:
    """Return even splits, with ends that count as layers or not; if there are none, ends with fewer layers.

    `mtp` is the number of MTP depths, which stay with the head.
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
    """Yield splits with middle ranks of one size; the last rank has the head, so no more layers than the first."""
    if pp == 2:
        yield LayerSplit(last=layers // 2)
        return
    for middle in range(-(-layers // pp), layers // (pp - 2) + 1):
        left = layers - middle * (pp - 2)
        lasts = [last for last in (left // 2, left // 2 - 1) if last >= 1 and left - last <= middle]
        for last in lasts:  # one layer fewer to balance the head
            first = left - last
            yield from (LayerSplit(vpp, first=first, last=last) for vpp in _virtual(first, last, middle))
        if lasts:
            return


def _layouts(layers: int, mtp: int, pp: int) -> Iterator[LayerSplit]:
    """Yield explicit virtual stages: embedding, layers, depths and head in equal parts, middle ones one larger."""
    units = "E" + "t" * layers + "m" * mtp + "L"
    for vpp in (2, 4):
        size, remainder = divmod(len(units), pp * vpp)
        if size < max(1, mtp + 1):
            return
        ends = [size + (1 <= stage <= remainder) for stage in range(pp * vpp)]
        starts = [sum(ends[:stage]) for stage in range(pp * vpp)]
        yield LayerSplit(layout="|".join(units[start : start + n] for start, n in zip(starts, ends, strict=True)))


def shardings(spec: RunSpec) -> tuple[DataSharding, ...]:
    """Return the data shardings to try; with a pipeline only "optim": the others communicate with every microbatch.

    Of one microbatch "optim_grads" is the same as "optim".
    """
    p = spec.parallel
    if (p.dp or 1) * p.cp == 1 or p.pp > 1:
        return ("optim",)
    if spec.batch.global_batch_size < 2 * (p.dp or 1):
        return ("optim", "optim_grads_params")
    return ("optim", "optim_grads", "optim_grads_params")


def replicas(spec: RunSpec, split: LayerSplit, sharding: DataSharding) -> Iterator[int]:
    """Yield the numbers of replicas to try, ascending: 1, and those of HSDP that can be faster than one replica.

    Replicas of one node each communicate between nodes only to all-reduce. Larger ones gather and reduce between nodes
    all the same, over fewer ranks: that pays only if a step does it repeatedly. Replicas that train apart (outer_steps)
    stay: another number of them is another training.
    """
    p = spec.parallel
    if p.outer_steps:
        yield p.dp_replicate
        return
    yield 1
    gathers_once = sharding == "optim" and split.chunks(p.pp) <= ACTIVE_CHUNKS
    yield from _replicas_of_nodes(spec, several=not gathers_once)


def _replicas_of_nodes(spec: RunSpec, several: bool) -> Iterator[int]:
    """Yield numbers of replicas, each with several shards on a node or, if `several`, on 1, 2, 4... nodes or a site."""
    p, per_node = spec.parallel, int(spec.cluster.devices_per_node)
    dp, site = p.dp or 1, site_size(spec.cluster)
    nodes, rest = divmod(p.tp * p.cp * dp, per_node)
    if rest:
        return
    sizes: list[int] = []  # of a replica in nodes
    for size in divisors(nodes)[:-1]:
        if not sizes or size >= 2 * sizes[-1] or size * per_node == site:
            sizes.append(size)
    for size in reversed(sizes if several else sizes[:1]):
        number = nodes // size
        if dp % number == 0 and dp * p.cp > number:
            yield number


def micro_batches(spec: RunSpec) -> Iterator[int]:
    """Yield the powers of two up to a data-parallel rank's samples; with "optim_grads" up to half of them."""
    share = spec.batch.global_batch_size // (spec.parallel.dp or 1)
    share //= 2 if spec.parallel.data_sharding == "optim_grads" else 1
    size = 1
    while size <= min(LARGEST_MICRO_BATCH, share):
        yield size
        size *= 2


def recomputations(spec: RunSpec) -> tuple[RecomputeSpec, ...]:
    """Return recomputation from none to full layers: each saves fewer activations than the last and recomputes more."""
    heavy: RecomputeModule = "mlp" if spec.model.moe.num_experts is None else "moe"
    none = replace(spec.recompute, granularity="none", method="uniform", num_layers=1, cpu_offloading_num_layers=0)
    return (
        none,
        replace(none, granularity="selective", modules=("norm", "activation")),
        replace(none, granularity="selective", modules=("norm", heavy)),
        replace(none, granularity="full"),
    )
