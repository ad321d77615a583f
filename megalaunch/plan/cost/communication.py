"""Seconds that exchanges take on their wires, by axis: where a group lies, how much each device sends.

Ring algorithms: an all-gather or reduce-scatter of V bytes over n devices sends V (n-1)/n from each.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.model import ModelSpec
from megalaunch.plan.cost import constants as c
from megalaunch.plan.cp_comm_type import most_common_cp_comm_type
from megalaunch.plan.topology import Topology
from megalaunch.platform.chips import ChipFacts


@dataclass(frozen=True)
class Interconnect:
    """Bytes a second that one device sends inside a node and to others, and how many devices a node has."""

    link: float
    network: float
    node: int

    @classmethod
    def from_cluster(cls, spec: RunSpec, chip: ChipFacts, node: int) -> Interconnect:
        """Those of a chip, with `cluster.node_bandwidth` where it is given; a missing figure is the default's."""
        given = spec.cluster.node_bandwidth
        network = given * 1e9 if given else chip.network_bandwidth or c.DEFAULT_NETWORK.value
        link = chip.link_bandwidth or c.DEFAULT_LINK.value
        return cls(link * c.LINK.value, network * c.NETWORK.value, node)

    def inside(self, size: int, stride: int) -> int:
        """How many of a group's members share a node; its members are `stride` ranks apart."""
        return max(1, min(size, self.node // stride))

    def ring(self, volume: float, size: int, stride: int) -> float:
        """Seconds to gather (or reduce and scatter) `volume` bytes; members of one node share their adapters."""
        if size == 1:
            return 0.0
        inside = self.inside(size, stride)
        pace = self.link if inside == size else min(self.link, inside * self.network)
        return volume * (size - 1) / size / pace

    def all_to_all(self, volume: float, size: int, stride: int) -> float:
        """Seconds until every member has sent each other an equal part of its `volume` bytes."""
        if size == 1:
            return 0.0
        inside = self.inside(size, stride)
        return max(volume * (size - inside) / size / self.network, volume * (inside - 1) / size / self.link)


@dataclass(frozen=True)
class CommTime:
    """Seconds of one kind of communication: what the step waits for, and what hides behind compute."""

    exposed: float = 0.0
    hidden: float = 0.0

    def times(self, count: float) -> CommTime:
        """As many of them."""
        return CommTime(self.exposed * count, self.hidden * count)


def tensor_parallel(spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float, experts: bool) -> CommTime:
    """One layer and one microbatch: two regions, entered and left, both passes (Korthikanti et al. 2022, figure 5).

    With sequence parallelism inputs are gathered once more for the gradients of weights, beside another matmul.
    Experts need no such exchange: their tokens travel on the ep axis.
    """
    if topology.tp == 1:
        return CommTime()
    regions = 1 if experts and not spec.model.moe.shared_ffn_hidden_size else 2
    one = wires.ring(tokens * spec.model.hidden_size * 2, topology.tp, 1)
    waiting, beside = one * 4 * regions, one * regions if spec.parallel.sequence_parallel else 0.0
    if not spec.parallel.tp_comm_overlap:
        return CommTime(waiting, beside)
    exposed = waiting * c.TP_EXPOSED.value
    return CommTime(exposed, waiting - exposed + beside)


def context_parallel(
    spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float, widths: tuple[float, float], attention: float
) -> CommTime:
    """One layer and one microbatch; `widths` of queries and of keys with values, `attention` seconds to hide behind.

    p2p (Liu et al. 2023): keys and values go around, both passes, and their gradients in the second. a2a (Jacobs et
    al. 2023): all four tensors change from sequence to heads and back. allgather: keys and values at once. Documents
    dealt out by length: as if each were as long as its sample, which is the most that travels.
    """
    cp, tp = topology.cp, topology.tp
    if cp == 1:
        return CommTime()
    queries, keys = widths
    way = most_common_cp_comm_type(spec.parallel)
    if way == "a2a":
        return CommTime(2 * wires.all_to_all(tokens * 2 * (2 * queries + keys), cp, tp))
    if spec.parallel.dynamic_context_parallel:  # keys there, their gradients back
        return CommTime(2 * wires.ring(cp * tokens * keys * 2, cp, tp))
    ring = 3 * wires.ring(cp * tokens * keys * 2, cp, tp)
    if way == "allgather":
        return CommTime(ring)
    if way == "a2a+p2p" and spec.parallel.hierarchical_context_parallel_sizes:
        inner = spec.parallel.hierarchical_context_parallel_sizes[0]
        both = 2 * wires.all_to_all(tokens * 2 * (2 * queries + keys), inner, tp)
        ring = 3 * wires.ring(cp // inner * tokens * keys * 2, cp // inner, tp * inner)
        return CommTime(both + max(0.0, ring - attention), min(ring, attention))
    return CommTime(max(0.0, ring - attention), min(ring, attention))


def expert_parallel(spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float) -> CommTime:
    """One layer with experts and one microbatch: tokens go and come back, both passes."""
    if topology.ep * topology.etp == 1:
        return CommTime()
    part = topology.tp if spec.parallel.sequence_parallel else 1
    volume = tokens / part * spec.model.moe.top_k * spec.model.hidden_size * 2
    seconds = 4 * wires.all_to_all(volume, topology.ep, topology.etp)
    seconds += 4 * wires.ring(volume * topology.etp, topology.etp, 1)
    exposed = seconds * (c.EP_EXPOSED.value if spec.parallel.overlap_moe_expert_parallel_comm else 1.0)
    return CommTime(exposed, seconds - exposed)


def pipeline(spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float, chunks: int) -> CommTime:
    """One microbatch on one rank: its activation on and its gradient back, for every chunk."""
    if topology.pp == 1:
        return CommTime()
    part = topology.tp if spec.parallel.sequence_parallel else 1
    between = topology.tp * topology.cp * topology.dp * topology.pp > wires.node  # pp is the slowest axis
    pace = wires.network if between else wires.link
    seconds = 2 * chunks * tokens / part * spec.model.hidden_size * 2 / pace
    return CommTime(0.0, seconds) if spec.parallel.overlap_p2p_comm else CommTime(seconds)


def data_parallel(
    spec: RunSpec, topology: Topology, wires: Interconnect, held: tuple[float, float], unit: float, window: float
) -> CommTime:
    """One step: gradients reduced and parameters gathered, for `held` dense and expert parameters of one device.

    `window` is the compute of one microbatch. Reductions hide behind backward passes (2/3 of it), a gather behind
    the first forward pass (1/3), those of whole sharding behind every pass; what belongs to one `unit` cannot hide.
    A pipeline gathers and reduces once a step, whatever is sharded.
    """
    p, microbatches = spec.parallel, topology.microbatches
    whole = p.data_sharding == "optim_grads_params" and topology.pp == 1
    rounds = microbatches if topology.pp == 1 and p.data_sharding in ("optim_grads", "optim_grads_params") else 1
    width = 2 if spec.precision.grad_reduce_dtype == "bf16" else 4
    reducing = rounds * _dense_and_expert(spec, topology, wires, held, width) + _replica_all_reduce(
        spec, topology, wires, held, width
    )
    gathering = 0.0
    if p.data_sharding != "no_shard":
        gathering = (2 * microbatches if whole else 1) * _dense_and_expert(spec, topology, wires, held, 2)
    share = unit / max(1.0, sum(held))
    hidden = 0.0
    if p.overlap_grad_reduce:
        hidden += min(reducing * (1 - share / rounds), window * rounds * c.BACKWARD_SHARE.value)
    if p.overlap_param_gather:
        room = window * microbatches if whole else window * (1 - c.BACKWARD_SHARE.value)
        hidden += min(gathering * (1 - (share / microbatches if whole else share)), room)
    return CommTime(reducing + gathering - hidden, hidden)


def _dense_and_expert(
    spec: RunSpec, topology: Topology, wires: Interconnect, held: tuple[float, float], each: int
) -> float:
    """Seconds to move `each` bytes of every dense and expert parameter once through its group of shards.

    They are gathered, or reduced and scattered, within a copy of the model.
    """
    return sum(
        wires.ring(parameters * each, shards, stride) for parameters, shards, _, stride in _grids(spec, topology, held)
    )


def _replica_all_reduce(
    spec: RunSpec, topology: Topology, wires: Interconnect, held: tuple[float, float], each: int
) -> float:
    """Seconds to sum each device's share over the copies of the model: once a step, whatever the strategy (HSDP)."""
    return sum(
        2 * wires.ring(parameters * each / shards, replicas, stride * shards)
        for parameters, shards, replicas, stride in _grids(spec, topology, held)
    )


def _grids(
    spec: RunSpec, topology: Topology, held: tuple[float, float]
) -> tuple[tuple[float, int, int, int], tuple[float, int, int, int]]:
    """Of dense and expert parameters: how many a device holds, shards, copies, and how far apart the ranks are."""
    whole = spec.parallel.data_sharding == "no_shard"
    copies = topology.dp * topology.cp if whole else topology.dp_replicate

    def of(parameters: float, size: int, stride: int) -> tuple[float, int, int, int]:
        replicas = max(1, min(copies, size))
        return parameters, max(1, size // replicas), replicas, stride

    return (
        of(held[0], topology.dp * topology.cp, topology.tp),
        of(held[1], topology.edp, topology.ep * topology.etp),
    )


def key_widths(model: ModelSpec, tp: int) -> tuple[float, float]:
    """Widths on one rank of queries, and of keys and values together."""
    if model.mla.kv_lora_rank:
        heads = model.num_attention_heads / tp
        query = heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
        return query, query + heads * model.mla.v_head_dim
    head_dim, groups = model.head_dim or 0, model.num_query_groups or 1
    return model.num_attention_heads * head_dim / tp, 2 * head_dim * max(1.0, groups / tp)
