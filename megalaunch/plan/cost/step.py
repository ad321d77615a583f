"""Time of one optimizer step by kind: compute, exposed communication, pipeline bubble, optimizer.

The slowest pipeline rank sets the pace of every microbatch; the others determine the time to fill and drain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megalaunch.plan.activation_layers import offloaded_layers, recomputed_layers
from megalaunch.plan.cost import communication as wire
from megalaunch.plan.cost import constants as c
from megalaunch.plan.cost.attention import attention_kernel
from megalaunch.plan.cost.communication import (
    CommTime,
    Interconnect,
    ShardingRounds,
    activation_bytes,
    sharding_rounds,
)
from megalaunch.plan.cost.layer import Device, LayerTime, Shape, head_time, layer_time
from megalaunch.plan.cost.muon import muon_seconds
from megalaunch.plan.cost.stacks import Stack, engine_stack
from megalaunch.plan.cost.update import update_traffic
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.flops import sequence_flops
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.memory.offloaded_activations import offloaded_bytes
from megalaunch.plan.memory.param_bytes import main_param_bytes
from megalaunch.plan.stage_params import DataShards, DeviceParams, VirtualStage, chunks_by_rank, params_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec
from megalaunch.schema.model import ModelSpec

_BUBBLE = {"zero_bubble": c.ZERO_BUBBLE.value, "zbv": 0.0, "dualpipev": 0.0}  # as a fraction of 1F1B's bubble


class UnknownChipSpeed(ValueError):
    """The chip's speed is not known, so no time can be predicted."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and the rates derived from them.

    `communication` is by parallel axis, `host` are copies of activations to host memory and back.

    `matmul`, `attention`, `memory`, `head`, `recompute`, `launch_overhead`: compute, with the kernels of `stack`. MFU
    is relative to the 16-bit peak, whatever the dtype of the matmuls. `grouped` is the part of `matmul` in routed
    experts, `permutation` the part of `memory` in which their rows are permuted.
    """

    stack: Stack

    matmul: float
    attention: float
    memory: float
    head: float
    recompute: float
    launch_overhead: float
    grouped: float
    permutation: float
    communication: dict[str, CommTime]
    bubble: float
    optimizer: float
    tokens: int
    world: int
    flops: int
    full_flops: int
    peak: float

    @property
    def compute(self) -> float:
        """Seconds of compute."""
        return self.matmul + self.attention + self.memory + self.head + self.recompute + self.launch_overhead

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(comm.exposed for comm in self.communication.values())

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exposed + self.bubble + self.optimizer

    @property
    def tokens_per_second_per_device(self) -> float:
        """Trained tokens per second and device."""
        return self.tokens / self.world / self.total

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of one device, with causal attention."""
        return self.flops / self.world / self.total

    @property
    def mfu_causal(self) -> float:
        """Model FLOPs utilization (MFU), counting causal attention."""
        return self.flops_per_device / self.peak

    @property
    def mfu_full(self) -> float:
        """MFU counting non-causal attention, as in many published figures."""
        return self.full_flops / self.world / self.total / self.peak


@dataclass(frozen=True)
class _RankTime:
    """Seconds of one microbatch on one pipeline rank."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    head: float = 0.0
    again: float = 0.0
    tp: CommTime = CommTime()
    cp: CommTime = CommTime()
    ep: CommTime = CommTime()
    host: CommTime = CommTime()

    grouped: float = 0.0
    permutation: float = 0.0
    launches: float = 0.0
    overlap_slowdown: float = 0.0

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.memory + self.head + self.again

    @property
    def exposed(self) -> float:
        return self.tp.exposed + self.cp.exposed + self.ep.exposed + self.host.exposed

    @property
    def overhead(self) -> float:
        """Gaps between kernels, the slowdown by overlapped collectives, and the wait for a host that launches late."""
        hidden = self.tp.hidden + self.cp.hidden + self.ep.hidden
        overhead = self.compute * c.LAUNCH_OVERHEAD.value + hidden * self.overlap_slowdown
        return max(overhead, self.launches * c.HOST_LAUNCH.value - self.compute - self.exposed)

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.overhead


def step_time(spec: RunSpec, stack: Stack | None = None, chip: ChipFacts | None = None) -> StepTime:
    """Return the seconds of one step of a resolved spec.

    Args:
        spec: the run.
        stack: whose kernels it runs on; None: this engine's.
        chip: the device; None: that of the spec.

    Raises:
        UnknownChipSpeed: the chip has no figures.
        ValueError: a degree does not divide (StageError for stages).
    """
    chip = chip or CHIPS.get(spec.platform.chip)
    device = _device(chip, spec, stack or engine_stack(spec))
    assert chip is not None
    topology = Topology.from_spec(spec)
    wires = Interconnect.from_cluster(spec, chip, _domain(chip, topology))
    ranks = chunks_by_rank(spec)
    kinds = _kind_times(spec, topology, device, wires, ranks)
    times = []
    for chunks in ranks:
        time = _rank_time(spec, chunks, kinds, _head(spec, topology, device, chunks), device.stack)
        if spec.recompute.cpu_offloading_num_layers:
            time = replace(time, host=_host_copies(spec, topology, device, chunks, kinds))
        times.append(time)
    slowest = max(range(len(times)), key=lambda rank: times[rank].total)
    return _assemble(spec, topology, device, wires, times, slowest)


def _assemble(
    spec: RunSpec, topology: Topology, device: Device, wires: Interconnect, times: list[_RankTime], slowest: int
) -> StepTime:
    worst, microbatches, ranks = times[slowest], topology.microbatches, chunks_by_rank(spec)
    chunks = len(ranks[slowest])
    params = params_by_rank(spec, topology.tp, topology.ep * topology.etp)[slowest]
    tokens = topology.micro_batch_size * spec.batch.sequence_length / topology.cp
    rounds = sharding_rounds(spec, topology, device.stack, slowest, chunks)
    sizes = (params.dense, params.experts)
    communication = {
        "tp": worst.tp.times(microbatches),
        "cp": worst.cp.times(microbatches),
        "ep": worst.ep.times(microbatches),
        "host": worst.host.times(microbatches),
        "pp": wire.pipeline(spec, topology, wires, tokens, chunks).times(microbatches),
        "dp": wire.data_parallel(spec, topology, wires, rounds, sizes, params.layer, worst.compute),
        "outer": wire.outer_step(spec, topology, wires, sizes),
    }
    slowdown = communication["dp"].hidden * device.stack.overlap_slowdown.value
    peaks = CHIPS[spec.platform.chip].peak_flops
    peak = peaks.get("bf16", peaks.get("fp16", device.attention_flops))
    flops, full = _model_flops(spec)
    return StepTime(
        stack=device.stack,
        matmul=worst.matmul * microbatches,
        attention=worst.attention * microbatches,
        memory=worst.memory * microbatches + _copies(rounds, params, device),
        head=worst.head * microbatches,
        recompute=worst.again * microbatches,
        launch_overhead=worst.overhead * microbatches + slowdown,
        grouped=worst.grouped * microbatches,
        permutation=worst.permutation * microbatches,
        communication=communication,
        bubble=_bubble(spec, times, slowest, chunks),
        optimizer=_optimizer(spec, topology, params, device)
        + (muon_seconds(spec, topology, device, wires, ranks[slowest]) if spec.optimizer.name == "muon" else 0.0),
        tokens=spec.batch.global_batch_size * spec.batch.sequence_length,
        world=topology.world,
        flops=flops,
        full_flops=full,
        peak=peak,
    )


def _copies(rounds: ShardingRounds, params: DeviceParams, device: Device) -> float:
    """Return the seconds in which parameters and gradients are copied around the collectives of data parallelism."""
    stack = device.stack
    each = rounds.gathers * stack.gather_copy.value + rounds.reductions * stack.reduce_copy.value
    return (params.dense + params.experts) * each / device.memory


def known_peak(spec: RunSpec, chip: ChipFacts | None) -> float:
    """Return the peak FLOP/s of a chip for what a run does not compute in fp8.

    Raises:
        UnknownChipSpeed: the chip lacks a figure that the time of a step is computed from.
    """
    if chip is None or chip.memory_bandwidth is None or not chip.peak_flops:
        raise UnknownChipSpeed(
            f"the speed of {chip.name if chip else 'this chip'} is unknown: no peak FLOP/s in the table of chips"
        )
    name, multiplied = _dtypes(spec)
    for dtype in (name, multiplied):
        if dtype not in chip.peak_flops:
            raise UnknownChipSpeed(f"{chip.name} has no known peak in {dtype}")
    return chip.peak_flops[name]


def _dtypes(spec: RunSpec) -> tuple[str, str]:
    """Return the dtype of activations, and that in which layers multiply: of emulated fp8 fp32."""
    precision, compute = spec.precision, spec.precision.compute_dtype
    fp32 = "tf32" if precision.tf32 else "fp32"
    name = {"fp16": "fp16", "fp32": fp32}.get(compute, "bf16")
    return name, fp32 if precision.emulates_fp8 else "fp8" if compute == "fp8" else name


def _device(chip: ChipFacts | None, spec: RunSpec, stack: Stack) -> Device:
    """Return the rates of a chip for a precision, with the kernels of a stack."""
    peak = known_peak(spec, chip)
    assert chip is not None
    assert chip.memory_bandwidth is not None
    precision, compute, multiplied = spec.precision, spec.precision.compute_dtype, _dtypes(spec)[1]
    head = peak * stack.matmul_16.value
    matmul = chip.peak_flops[multiplied] * (stack.matmul_8 if multiplied == "fp8" else stack.matmul_16).value
    return Device(
        stack=stack,
        attention_flops=peak,
        matmul_flops=matmul,
        weight_gradient_flops=matmul if precision.fp8.wgrad else head,
        head_flops=head,
        fp32_flops=chip.peak_flops.get("tf32" if precision.tf32 else "fp32", peak) * stack.matmul_16.value,
        memory=chip.memory_bandwidth * c.MEMORY.value,
        host=(chip.host_bandwidth or c.DEFAULT_LINK.value) * c.HOST_LINK.value,
        float8=compute == "fp8",
        element=activation_bytes(spec),
    )


def _domain(chip: ChipFacts, topology: Topology) -> int:
    """Return the devices joined by fast links: of a node, or of a rack where the chip's links span one."""
    return max(topology.devices_per_node, min(topology.world, chip.link_domain or 0))


def _kind_times(
    spec: RunSpec, topology: Topology, device: Device, wires: Interconnect, ranks: tuple[tuple[VirtualStage, ...], ...]
) -> dict[Layer, _RankTime]:
    """Return the time of one layer of every kind, with its communication."""
    shape, stack = _shape(spec, topology), device.stack
    kernels = {window: attention_kernel(spec, stack, window) for window in _windows(ranks)}
    kinds = {kind for chunks in ranks for chunk in chunks for kind, _ in chunk.kinds}
    found = {}
    for kind in kinds:
        time: LayerTime = layer_time(spec.model, kind, shape, device, kernels[kind.window])
        found[kind] = _RankTime(
            matmul=time.matmul,
            attention=time.attention,
            memory=time.memory,
            again=time.recompute,
            grouped=time.grouped,
            permutation=time.permutation,
            launches=stack.launches.value + kernels[kind.window].launches,
            tp=wire.tensor_parallel(spec, topology, wires, stack, shape.tokens, kind.experts),
            cp=wire.context_parallel(spec, topology, wires, stack, shape.tokens, time.attention),
            ep=wire.expert_parallel(spec, topology, wires, shape.tokens, time.total) if kind.experts else CommTime(),
        )
    return found


def _windows(ranks: tuple[tuple[VirtualStage, ...], ...]) -> set[int | None]:
    return {kind.window for chunks in ranks for chunk in chunks for kind, _ in chunk.kinds}


def _shape(spec: RunSpec, topology: Topology) -> Shape:
    recompute, length = spec.recompute, spec.batch.sequence_length
    return Shape(
        tokens=topology.micro_batch_size * length / topology.cp,
        sequence=length,
        tp=topology.tp,
        ep=topology.ep,
        etp=topology.etp,
        sequence_parallel=bool(spec.parallel.sequence_parallel),
        expert_rows=ExpertRows.from_spec(spec),
        recomputed_modules=recompute.modules if recompute.granularity == "selective" else (),
        full_recompute=recompute.granularity == "full",
    )


def _head(spec: RunSpec, topology: Topology, device: Device, chunks: tuple[VirtualStage, ...]) -> float:
    """Return the seconds of the head on one rank, which it applies to the decoder's output and to each MTP depth's."""
    heads = any(chunk.head for chunk in chunks) * (1 + spec.model.mtp.num_layers)
    return heads * _head_time(spec.model, _shape(spec, topology), device, count_loss_chunks(spec)) if heads else 0.0


_head_time = lru_cache(maxsize=1024)(head_time)


def _rank_time(
    spec: RunSpec, chunks: tuple[VirtualStage, ...], kinds: dict[Layer, _RankTime], head: float, stack: Stack
) -> _RankTime:
    counts: dict[Layer, int] = {}
    again = 0.0
    for chunk in chunks:
        again += sum(kinds[kind].again * count for kind, count in recomputed_layers(spec.recompute, chunk))
        for kind, count in chunk.kinds:
            counts[kind] = counts.get(kind, 0) + count
    pairs = [(kinds[kind], count) for kind, count in counts.items()]

    def summed(axis: str) -> CommTime:
        each = [(getattr(time, axis), count) for time, count in pairs]
        return CommTime(sum(e.exposed * n for e, n in each), sum(e.hidden * n for e, n in each))

    return _RankTime(
        matmul=sum(time.matmul * count for time, count in pairs),
        attention=sum(time.attention * count for time, count in pairs),
        memory=sum(time.memory * count for time, count in pairs),
        head=head,
        again=again,
        grouped=sum(time.grouped * count for time, count in pairs),
        permutation=sum(time.permutation * count for time, count in pairs),
        tp=summed("tp"),
        cp=summed("cp"),
        ep=summed("ep"),
        launches=sum(time.launches * count for time, count in pairs),
        overlap_slowdown=stack.overlap_slowdown.value,
    )


def _host_copies(
    spec: RunSpec,
    topology: Topology,
    device: Device,
    chunks: tuple[VirtualStage, ...],
    kinds: dict[Layer, _RankTime],
) -> CommTime:
    """Return the copies of activations to host memory and back for one microbatch on one pipeline rank.

    Copies to the host overlap with computation until the backward pass of the stage's first offloaded layer, copies
    back with that of the offloaded layers, each of which starts the copy of the layer before it.
    """
    exposed = hidden = 0.0
    for chunk in chunks:
        copy = offloaded_bytes(spec, topology, chunk) / device.host
        compute = sum(kinds[kind].compute * count for kind, count in chunk.kinds)
        offloaded = sum(kinds[kind].compute * count for kind, count in offloaded_layers(spec.recompute, chunk))
        back = c.BACKWARD_SHARE.value * offloaded
        waits = max(0.0, copy - (compute - back)) + max(0.0, copy - back)
        exposed, hidden = exposed + waits, hidden + 2 * copy - waits
    return CommTime(exposed, hidden)


def _bubble(spec: RunSpec, times: list[_RankTime], slowest: int, chunks: int) -> float:
    """Return the seconds in which the slowest rank waits for fill and drain: one microbatch on each other rank.

    Narayanan et al. 2021b: (pp - 1) (forward + backward) / chunks.
    """
    others = sum(time.total for rank, time in enumerate(times) if rank != slowest)
    v_shaped = spec.parallel.schedule in ("zbv", "dualpipev")
    return others / (1 if v_shaped else chunks) * _BUBBLE.get(spec.parallel.schedule, 1.0)


def _optimizer(spec: RunSpec, topology: Topology, params: DeviceParams, device: Device) -> float:
    """Return the seconds to update one device's shard, a fraction of it on the host at the same time.

    The host's update, and the copies of weights and gradients to it and of weights from it, overlap parameter by
    parameter, so that the slowest of the three is the time. The devices of a node share the host.
    """
    owned, fraction = DataShards.from_topology(topology).of(params), spec.optimizer.optimizer_offload_fraction
    to_host = 2 * main_param_bytes(spec) * owned * fraction / device.host
    on_host = owned * fraction * topology.devices_per_node / c.HOST_UPDATE.value
    on_device = owned * (1 - fraction) * update_traffic(spec) / device.memory
    return max(on_device, on_host, to_host)


def _model_flops(spec: RunSpec) -> tuple[int, int]:
    tokens = spec.batch.global_batch_size * spec.batch.sequence_length
    causal, full = _sequence_flops(spec.model, spec.batch.sequence_length)
    return causal * tokens // spec.batch.sequence_length, full * tokens // spec.batch.sequence_length


@lru_cache(maxsize=256)
def _sequence_flops(model: ModelSpec, length: int) -> tuple[int, int]:
    return sequence_flops(model, length, length), sequence_flops(model, length, length, full_attention=True)
