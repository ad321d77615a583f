"""Time of collectives by parallel axis: where the ranks of a group are placed, and the bytes that each device sends.

Ring algorithms: an all-gather or reduce-scatter of V bytes over n devices sends V (n-1)/n bytes from each device.
All-reduce = reduce-scatter + all-gather, so it takes twice that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalaunch.plan.cost import constants as c
from megalaunch.plan.cost.stacks import Stack
from megalaunch.plan.cost.stage_gathers import stage_gathers
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.memory.model_states import OUTER_BUCKET
from megalaunch.plan.stage_validation import splits_backward
from megalaunch.plan.topology import Topology, most_common_cp_comm_type
from megalaunch.plan.world import site_size
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.schema import RunSpec
from megalaunch.schema.model import ModelSpec


@dataclass(frozen=True)
class Interconnect:
    """What one device sends within a node, to other nodes of its site, and to other sites.

    Attributes:
        link: bytes per second within a node.
        network: bytes per second to other nodes.
        node: devices of a node.
        site: devices of a site; None: there is one site.
        site_link: bytes per second of all devices of a site together to other sites.
        node_latency: seconds of a message between nodes.
        site_latency: seconds of a message between sites.
        rack: a node is a rack, some of whose devices stay idle rather than divide a group that fits.
    """

    link: float
    network: float
    node: int
    site: int | None = None
    site_link: float = 0.0
    node_latency: float = 0.0
    site_latency: float = 0.0
    rack: bool = False

    @classmethod
    def from_cluster(cls, spec: RunSpec, chip: ChipFacts, node: int) -> Interconnect:
        """Return a chip's bandwidths, the network's from `cluster.node_bandwidth` if given; defaults if unknown."""
        given = spec.cluster.node_bandwidth
        network = given * 1e9 if given else chip.network_bandwidth or c.DEFAULT_NETWORK.value
        link = chip.link_bandwidth or c.DEFAULT_LINK.value
        cluster, site = spec.cluster, site_size(spec.cluster)
        between_sites = cluster.site_bandwidth * 1e9 if cluster.site_bandwidth else network * (site or 0)
        return cls(
            link * c.LINK.value,
            network * c.NETWORK.value,
            min(node, site or node),
            site,
            between_sites * c.NETWORK.value,
            cluster.node_latency / 1e6,
            cluster.site_latency / 1e3,
            node != cluster.devices_per_node,
        )

    def inside(self, size: int, stride: int) -> int:
        """Return how many members of a group share a node, at least; its members are `stride` ranks apart.

        A group that neither divides a node nor consists of nodes begins or ends within one.
        """
        devices = min(size * stride, self.node) if self.rack else math.gcd(size * stride, self.node)
        return max(1, devices // stride)

    def is_across_sites(self, size: int, stride: int) -> bool:
        """Return whether such groups have members in several sites."""
        return size > 1 and self.site is not None and self.site % (size * stride) > 0

    def latency(self, size: int, stride: int) -> float:
        """Return the seconds of a message between neighbours of such a group that are farthest apart."""
        if self.is_across_sites(size, stride):
            return self.site_latency
        return 0.0 if self.inside(size, stride) == size else self.node_latency

    def ring(self, volume: float, size: int, stride: int, calls: float = 1) -> float:
        """Return the seconds of all-gathers or reduce-scatters of `volume` bytes together over `size` devices.

        A ring across nodes uses the network adapters of all its members in a node. Across sites, rings of all devices
        of a site share its link, through which each ring passes once. Each of the `calls` waits for the latency.
        """
        if size == 1:
            return 0.0
        inside = self.inside(size, stride)
        pace = self.link if inside == size else min(self.link, inside * self.network)
        if self.is_across_sites(size, stride) and self.site is not None:
            pace = min(pace, self._site_share(max(1, min(size, self.site // stride))))
        return volume * (size - 1) / size / pace + calls * self._ring_latency(size, stride)

    def _ring_latency(self, size: int, stride: int) -> float:
        """Return the seconds of latency on the way of a part of the data over size - 1 neighbours."""
        nodes, sites = math.ceil((size - 1) / self.inside(size, stride)), 0
        if self.inside(size, stride) == size:
            nodes = 0
        if self.is_across_sites(size, stride) and self.site is not None:
            sites = math.ceil((size - 1) / max(1, min(size, self.site // stride)))
        return sites * self.site_latency + (nodes - min(nodes, sites)) * self.node_latency

    def _site_share(self, devices: float) -> float:
        """Return the bytes per second through the link of a site that so many of its devices have as their share."""
        return self.site_link * devices / (self.site or 1)

    def all_to_all(self, volume: float, size: int, stride: int) -> float:
        """Return the seconds of an all-to-all: each member sends an equal part of `volume` bytes to every other one."""
        if size == 1:
            return 0.0
        inside = self.inside(size, stride)
        seconds = max(volume * (size - inside) / size / self.network, volume * (inside - 1) / size / self.link)
        if self.is_across_sites(size, stride) and self.site is not None:
            here = max(1, min(size, self.site // stride))
            seconds = max(seconds, volume * (size - here) / size / self._site_share(1))
        return seconds + self.latency(size, stride)

    def send(self, volume: float, size: int, stride: int) -> float:
        """Return the seconds to send `volume` bytes to the next of `size` devices, as all devices there do."""
        far = self.is_across_sites(size, stride)
        between = size * stride > self.node
        pace = min(self.network, self._site_share(1)) if far else self.network if between else self.link
        return volume / pace + self.latency(size, stride)


@dataclass(frozen=True)
class CommTime:
    """Seconds of one kind of communication: exposed (the step waits for it) and hidden (overlapped with compute)."""

    exposed: float = 0.0
    hidden: float = 0.0

    def times(self, count: float) -> CommTime:
        """Return the time of `count` such communications."""
        return CommTime(self.exposed * count, self.hidden * count)


def activation_bytes(spec: RunSpec) -> int:
    """Return the bytes of an activation, and of a weight as it is all-gathered, in the compute dtype."""
    return 4 if spec.precision.compute_dtype == "fp32" else 2


def tensor_parallel(
    spec: RunSpec, topology: Topology, wires: Interconnect, stack: Stack, tokens: float, experts: bool
) -> CommTime:
    """Return the tensor-parallel time of one layer and microbatch (Korthikanti et al. 2022, figure 5).

    A layer has two regions (attention, feed-forward). With sequence parallelism each has an all-gather and a
    reduce-scatter in forward and in backward; backward also all-gathers the inputs again for the weights' gradients,
    overlapped with another matmul. Without it each has one all-reduce in either pass: the same volume. Routed experts
    have no tensor-parallel region: their tokens are sent over the ep axis.
    """
    if topology.tp == 1:
        return CommTime()
    regions = 1 if experts and not spec.model.moe.shared_ffn_hidden_size else 2
    one = wires.ring(tokens * spec.model.hidden_size * activation_bytes(spec), topology.tp, 1)
    exposed_time, hidden = one * 4 * regions, one * regions if spec.parallel.sequence_parallel else 0.0
    if not spec.parallel.tp_comm_overlap:
        return CommTime(exposed_time, hidden)
    exposed = exposed_time * stack.tp_exposed.value
    return CommTime(exposed, exposed_time - exposed + hidden)


def context_parallel(
    spec: RunSpec,
    topology: Topology,
    wires: Interconnect,
    stack: Stack,
    tokens: float,
    attention: float,
) -> CommTime:
    """Return the context-parallel time of one layer and microbatch.

    p2p, ring attention (Liu et al. 2023): send/recv of keys and values around the ring in both passes, and of their
    gradients in backward (fp32 in this engine), overlapped with attention. a2a, Ulysses (Jacobs et al. 2023):
    all-to-all of queries, keys, values and outputs from sequence to heads and back. allgather: the volume of the ring,
    exposed. Dynamic context parallelism: as if each document had the length of its sample, which is the largest volume.

    Args:
        attention: seconds of attention, with which the ring overlaps.
    """
    cp, tp, element = topology.cp, topology.tp, activation_bytes(spec)
    if cp == 1:
        return CommTime()
    queries, keys = key_widths(spec.model, tp)
    comm_type = most_common_cp_comm_type(spec.parallel)
    if comm_type == "a2a":
        return CommTime(2 * wires.all_to_all(tokens * element * (2 * queries + keys), cp, tp))
    if spec.parallel.dynamic_context_parallel:  # all-gather of keys and values, reduce-scatter of their gradients
        return CommTime(2 * wires.ring(cp * tokens * keys * element, cp, tp))
    if comm_type == "allgather":
        return CommTime(3 * wires.ring(cp * tokens * keys * element, cp, tp))
    exposed, size, stride = 0.0, cp, tp
    if comm_type == "a2a+p2p" and spec.parallel.hierarchical_context_parallel_sizes:
        inner = spec.parallel.hierarchical_context_parallel_sizes[0]
        exposed = 2 * wires.all_to_all(tokens * element * (2 * queries + keys), inner, tp)
        size, stride = cp // inner, tp * inner
    volume = size * tokens * keys * (2 * element + stack.ring_gradient_bytes)
    ring = wires.ring(volume, size, stride, calls=3)  # keys and values in both passes, their gradients in one
    hidden = min(ring, attention)
    return CommTime(exposed + ring - hidden, hidden)


def expert_parallel(spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float, compute: float) -> CommTime:
    """Return the expert-parallel time of one MoE layer and microbatch.

    Tokens are dispatched and combined by all-to-all over ep in both passes, each with a collective over etp; or all
    tokens are gathered, and the sums of their outputs scattered.

    Args:
        compute: seconds of the layer's compute, with which that of another microbatch overlaps.
    """
    if topology.ep * topology.etp == 1:
        return CommTime()
    volume = dispatch_bytes(spec, topology, tokens)
    if spec.parallel.moe_token_dispatcher_type == "allgather":
        seconds = 4 * wires.ring(volume, topology.ep * topology.etp, 1)
    else:
        seconds = 4 * wires.all_to_all(volume / topology.etp, topology.ep, topology.etp)
        seconds += 4 * wires.ring(volume, topology.etp, 1)
    if not spec.parallel.overlap_moe_expert_parallel_comm:
        return CommTime(seconds)
    exposed = max(seconds * c.EP_EXPOSED.value, seconds - compute)
    return CommTime(exposed, seconds - exposed)


def dispatch_bytes(spec: RunSpec, topology: Topology, tokens: float) -> float:
    """Return the bytes that arrive at the busiest rank in one dispatch of one layer and microbatch, its own included.

    `flex` sends less, a token once to each rank; it is planned as `alltoall`.
    """
    part = topology.tp if spec.parallel.sequence_parallel else 1
    rows = ExpertRows.from_spec(spec).arriving
    if spec.parallel.moe_token_dispatcher_type == "allgather":
        rows = topology.ep * topology.etp
    return tokens / part * rows * spec.model.hidden_size * activation_bytes(spec)


def pipeline(spec: RunSpec, topology: Topology, wires: Interconnect, tokens: float, chunks: int) -> CommTime:
    """Return the send/recv time of one microbatch on one pipeline rank: activations and gradients of every chunk."""
    if topology.pp == 1:
        return CommTime()
    part = topology.tp if spec.parallel.sequence_parallel else 1
    volume = tokens / part * spec.model.hidden_size * activation_bytes(spec)
    seconds = 2 * chunks * wires.send(volume, topology.pp, topology.tp * topology.cp * topology.dp)
    return CommTime(0.0, seconds) if spec.parallel.overlap_p2p_comm else CommTime(seconds)


@dataclass(frozen=True)
class ShardingRounds:
    """How often a step all-gathers the parameters of a layer, and how often it reduce-scatters its gradients.

    Of the all-gathers `ahead` are issued layer by layer, each while the layer before it computes.
    """

    gathers: float
    reductions: int
    ahead: float


def data_parallel(
    spec: RunSpec,
    topology: Topology,
    wires: Interconnect,
    rounds: ShardingRounds,
    params: tuple[float, float],
    unit: float,
    window: float,
) -> CommTime:
    """Return the data-parallel time of one step: reduction of gradients, and all-gather of parameters.

    Gradient reductions overlap with backward (2/3 of the compute of a microbatch), the all-reduce over replicas with
    that of the last microbatch, the all-gather of parameters with the first forward pass (1/3), or with every pass if
    parameters are gathered again in a step. The collectives of one `unit` (a layer) cannot overlap.

    Args:
        params: (dense, expert) parameters on one device.
        unit: parameters of the largest layer.
        window: seconds of compute of one microbatch.
    """
    p = spec.parallel
    width = 2 if spec.precision.grad_reduce_dtype == "bf16" else 4
    units = sum(params) / max(1.0, unit)  # each has collectives of its own
    reducing = rounds.reductions * _dense_and_expert(spec, topology, wires, params, width, units)
    all_reduce = _replica_all_reduce(spec, topology, wires, params, width, units)
    gathering = 0.0
    if _is_sharded(spec, topology):
        in_fp8 = spec.precision.compute_dtype == "fp8" and spec.precision.fp8.param_gather
        each = 1 if in_fp8 else activation_bytes(spec)  # embedding and head, a small part, are gathered in bf16 always
        gathering = rounds.gathers * _dense_and_expert(spec, topology, wires, params, each, units)
    share = unit / max(1.0, sum(params))
    backward = window * c.BACKWARD_SHARE.value
    hidden = 0.0
    if p.overlap_grad_reduce:
        hidden = min(reducing * (1 - share / rounds.reductions), backward * rounds.reductions)
        hidden += min(all_reduce * (1 - share), max(0.0, backward - hidden / rounds.reductions))  # in the last backward
    if p.overlap_param_gather:
        overlap = window * topology.microbatches if rounds.gathers > 1 else window - backward
        first = topology.microbatches if p.data_sharding == "optim_grads_params" else rounds.gathers
        hidden += min(gathering * (rounds.ahead / rounds.gathers) * (1 - share / first), overlap)
    # Every step all-reduces a few numbers over all ranks, to and fro: of tokens, and of loss and gradient norm.
    agreeing = 2 * c.STEP_SYNCS.value * wires.latency(topology.world, 1)
    return CommTime(reducing + all_reduce + gathering - hidden + agreeing, hidden)


def outer_step(spec: RunSpec, topology: Topology, wires: Interconnect, params: tuple[float, float]) -> CommTime:
    """Return the time of the all-reduce of an outer step over the replicas, in fp32, spread over its steps."""
    if not topology.outer_steps:
        return CommTime()
    shards = topology.dp_shard * topology.cp
    mine = sum(params) / shards
    calls = math.ceil(mine / OUTER_BUCKET)
    stride = topology.tp * topology.cp * topology.dp_shard
    return CommTime(2 * wires.ring(4 * mine, topology.dp_replicate, stride, calls) / topology.outer_steps)


def sharding_rounds(spec: RunSpec, topology: Topology, stack: Stack, rank: int, chunks: int) -> ShardingRounds:
    """Return the rounds of a pipeline rank with `chunks` virtual stages.

    Parameters are gathered once a step, unless a pipeline's runtime frees stages, or they are freed after each pass. Of
    a backward in two passes both begin with an all-gather of the whole stage, which nothing hides.
    """
    p, microbatches = spec.parallel, topology.microbatches
    if p.data_sharding == "optim_grads_params":
        split = splits_backward(p)
        return ShardingRounds((3 if split else 2) * microbatches, microbatches, (1 if split else 2) * microbatches)
    if p.data_sharding == "optim_grads":
        return ShardingRounds(1, microbatches, 1)
    gathers = 1.0
    if topology.pp > 1 and stack.frees_stages and _is_sharded(spec, topology):
        group = p.microbatch_group_size_per_vp_stage
        gathers = stage_gathers(p.schedule, topology.pp, chunks, rank, microbatches, group)
    return ShardingRounds(gathers, 1, gathers)


def _is_sharded(spec: RunSpec, topology: Topology) -> bool:
    """Return whether parameters are gathered: with no_shard only over context-parallel ranks."""
    return spec.parallel.data_sharding != "no_shard" or topology.cp > 1


def _dense_and_expert(
    spec: RunSpec, topology: Topology, wires: Interconnect, params: tuple[float, float], each: int, units: float
) -> float:
    """Return the seconds of one all-gather or reduce-scatter of all parameters, `each` bytes per parameter.

    Dense and expert parameters have groups of their own, within one replica of the model.
    """
    return sum(
        wires.ring(parameters * each, shards, stride, units if parameters else 0)
        for parameters, shards, _, stride in _grids(spec, topology, params)
    )


def _replica_all_reduce(
    spec: RunSpec, topology: Topology, wires: Interconnect, params: tuple[float, float], each: int, units: float
) -> float:
    """Return the seconds to all-reduce each device's shard over the replicas: once per step for any strategy (HSDP).

    None with outer steps.
    """
    return sum(
        2 * wires.ring(parameters * each / shards, replicas, stride * shards, units if parameters else 0)
        for parameters, shards, replicas, stride in _grids(spec, topology, params)
    )


def _grids(
    spec: RunSpec, topology: Topology, params: tuple[float, float]
) -> tuple[tuple[float, int, int, int], tuple[float, int, int, int]]:
    """Return (parameters of a device, shards, replicas, stride between ranks), of dense and of expert parameters.

    Of the ranks that reduce gradients in a step.
    """
    topology = topology.gradient_group
    apart = topology.has_expert_mesh and not topology.outer_steps
    expert_replicas = topology.edp_replicate if apart else topology.dp_replicate

    def of(parameters: float, size: int, replicas: int, stride: int) -> tuple[float, int, int, int]:
        return parameters, max(1, size // replicas), replicas, stride

    return (
        of(params[0], topology.dp * topology.cp, topology.dp_replicate, topology.tp),
        of(params[1], topology.edp, expert_replicas, topology.ep * topology.etp),
    )


def key_widths(model: ModelSpec, tp: int) -> tuple[float, float]:
    """Return the local widths of queries, and of keys and values together."""
    if model.mla.kv_lora_rank:
        heads = model.num_attention_heads / tp
        query = heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
        return query, query + heads * model.mla.v_head_dim
    head_dim, groups = model.head_dim or 0, model.num_query_groups or 1
    return model.num_attention_heads * head_dim / tp, 2 * head_dim * max(1.0, groups / tp)
