"""Predict a resolved spec: process groups, memory, time, speed, and days for a token budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalaunch.plan.batch import steps_by_size, tokens_requested
from megalaunch.plan.cost import (
    CONSTANTS,
    STATEMENTS,
    Constant,
    Statement,
    StepTime,
    UnknownChipSpeed,
    engine_stack,
    step_time,
)
from megalaunch.plan.cost.communication import dispatch_bytes
from megalaunch.plan.cost.update import update_traffic
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.flops import step_flops
from megalaunch.plan.memory import Memory, MemoryProfile, profile_for
from megalaunch.plan.memory.checkpoint_sizes import host_checkpoint_bytes
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups, dtype_bytes
from megalaunch.plan.memory.host_states import host_bytes_per_node
from megalaunch.plan.memory.model_states import GATHERED_LAYERS
from megalaunch.plan.memory.offloaded_activations import offloaded_bytes_per_node
from megalaunch.plan.memory.param_bytes import main_param_bytes
from megalaunch.plan.memory.rank import memory_by_rank
from megalaunch.plan.memory.saved_activations import rows_with_bytes, saved_bytes
from megalaunch.plan.stage_params import chunks_by_rank, params_by_rank
from megalaunch.plan.topology import RankGrid, Topology
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec

DAY = 86400.0
_SHARDING = {"sequence": "sharded by sequence", "tp": "sharded over tp", "replicated": "replicated"}
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Groups:
    """The process groups of one axis: `count` groups of `size` ranks that are `stride` apart; the first has rank 0."""

    axis: str
    size: int
    count: int
    stride: int
    inside_node: bool

    @property
    def first(self) -> list[int]:
        """The ranks of the group of rank 0."""
        return list(range(0, self.size * self.stride, self.stride))


@dataclass(frozen=True)
class ExpertWork:
    """The routed experts of the busiest rank.

    Attributes:
        imbalance: its tokens over the mean, after the limits of capacity and of the number of experts.
        parameters: of a rank, the most of any stage.
        edp: ranks that share these parameters.
        rows: rows of one layer and microbatch.
        dispatch_bytes: bytes that arrive in one dispatch of one layer and microbatch; 0 without expert parallelism.
    """

    imbalance: float
    parameters: float
    edp: int
    rows: float
    dispatch_bytes: float

    @classmethod
    def from_spec(cls, spec: RunSpec, topology: Topology) -> ExpertWork | None:
        """Return those of a resolved spec; None for a dense model."""
        if not spec.model.moe.num_experts:
            return None
        rows, ranks = ExpertRows.from_spec(spec), topology.ep * topology.etp
        tokens = topology.micro_batch_size * spec.batch.sequence_length / topology.cp
        part = topology.tp if spec.parallel.sequence_parallel else 1
        return cls(
            imbalance=rows.arriving / rows.sent / topology.etp,
            parameters=max(params.experts for params in params_by_rank(spec, topology.tp, ranks)),
            edp=topology.edp,
            rows=tokens / part * rows.arriving,
            dispatch_bytes=dispatch_bytes(spec, topology, tokens) if ranks > 1 else 0.0,
        )


@dataclass(frozen=True)
class Prediction:
    """The prediction of one spec; `by_rank` is by pipeline rank.

    `time` is that of this engine; None for a chip without speed figures, and for a run that the engine refuses.
    `why_no_time` is the reason in that case. `host_bytes` are those of optimizer states in the host memory of a node,
    `offloaded_bytes` those of activations, `checkpoint_host_bytes` those of checkpoints there.
    """

    topology: Topology
    groups: tuple[Groups, ...]
    by_rank: tuple[Memory, ...]
    device_bytes: int | None
    host_bytes: float
    offloaded_bytes: float
    checkpoint_host_bytes: int
    flops: int
    full_flops: int
    experts: ExpertWork | None
    time: StepTime | None
    why_no_time: str
    budget: float
    days: float | None

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most."""
        return max(self.by_rank, key=lambda memory: memory.total)

    def without_time(self, reason: str) -> Prediction:
        """Return the prediction of memory alone, with the reason why there is none of time."""
        return replace(self, time=None, days=None, why_no_time=self.why_no_time or reason)


def predict(spec: RunSpec, tokens: float | None = None) -> Prediction:
    """Predict a resolved spec.

    Args:
        tokens: the token budget; None: the tokens of train.steps.

    Raises:
        ValueError: the spec is open, or a degree does not divide (StageError for stages).
    """
    topology = Topology.from_spec(spec)
    budget = float(tokens_requested(spec)) if tokens is None else tokens
    time: StepTime | None = None
    why = ""
    try:
        time = step_time(spec)
    except UnknownChipSpeed as error:
        why = str(error)
    chip = CHIPS.get(spec.platform.chip)
    return Prediction(
        topology=topology,
        groups=tuple(rank_groups(topology)),
        by_rank=tuple(memory_by_rank(spec)),
        device_bytes=chip.memory_bytes if chip else None,
        host_bytes=host_bytes_per_node(spec),
        offloaded_bytes=offloaded_bytes_per_node(spec),
        checkpoint_host_bytes=host_checkpoint_bytes(spec),
        flops=step_flops(spec),
        full_flops=step_flops(spec, full_attention=True),
        experts=ExpertWork.from_spec(spec, topology),
        time=time,
        why_no_time=why,
        budget=budget,
        days=_seconds(spec, budget, time.total) / DAY if time else None,
    )


def _seconds(spec: RunSpec, tokens: float, full_step: float) -> float:
    """Return the seconds to train on `tokens`; a step's time grows linearly with the batch size of a rampup."""
    steps = list(steps_by_size(spec, tokens))
    full, first = spec.batch.global_batch_size, steps[0][1]
    if first == full:
        return sum(count for count, _ in steps) * full_step
    batch = replace(spec.batch, global_batch_size=first, rampup_batch_size=None)
    first_step = step_time(replace(spec, batch=batch)).total
    per_sample = (full_step - first_step) / (full - first)
    return sum(count * (first_step + (samples - first) * per_sample) for count, samples in steps)


def rank_groups(topology: Topology) -> Iterator[Groups]:
    """Yield every axis with more than one rank, of the dense and the expert grid, the fastest-changing axis first."""
    yield from _grid_groups(topology, topology.dense_grid, ("tp", "cp", "dp", "pp"))
    if topology.ep * topology.etp > 1:
        yield from _grid_groups(topology, topology.expert_grid, ("etp", "ep", "edp"))


def _grid_groups(topology: Topology, grid: RankGrid, axes: tuple[str, ...]) -> Iterator[Groups]:
    stride, node = 1, topology.devices_per_node
    for axis, size in grid.axes:
        if axis in axes and size > 1:
            last = stride * (size - 1)
            leaders = (rank for rank in range(topology.world) if rank // stride % size == 0)
            inside = all(rank // node == (rank + last) // node for rank in leaders)
            yield Groups(axis, size, topology.world // size, stride, inside)
        stride *= size


def parse_tokens(text: str) -> float:
    """Parse `15T`, `300B`, `1e12` to a number of tokens; raises ValueError with the expected form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([KMBT]?)\s*", text.upper())
    tokens = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if tokens <= 0:
        raise ValueError(f"{text!r} is not a number of tokens: write 15T, 300B, 20M or 1e12")
    return tokens


def assumptions(spec: RunSpec) -> Iterator[Constant | Statement]:
    """Yield the assumptions of the prediction: the chip's figures, and the constants of the time and memory models."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is not None:
        yield from _chip_assumptions(spec, chip)
    stack = engine_stack(spec)
    yield Statement("kernels", stack.meaning, stack.name)
    yield from stack.constants
    yield from CONSTANTS
    yield Constant("bytes moved per parameter by the update", update_traffic(spec), "plan/cost/update.py, by dtypes")
    yield from STATEMENTS
    if spec.model.moe.num_experts:
        yield Constant(
            "load of the busiest expert-parallel rank over the mean",
            spec.parallel.moe_load_imbalance,
            "parallel.moe_load_imbalance; published runs force 1",
        )
    profile = profile_for(spec)
    yield from _memory_assumptions(spec, profile)
    kinds = {kind for chunks in chunks_by_rank(spec) for chunk in chunks for kind, _ in chunk.kinds}
    kinds = {replace(kind, bf16=False) for kind in kinds}  # a layer saves the same in bf16 as in fp8
    for kind in sorted(kinds, key=lambda kind: (kind.mtp, kind.experts, kind.window or 0)):
        name = ("MTP depth" if kind.mtp else "layer with experts" if kind.experts else "layer") + (
            f" with window {kind.window}" if kind.window else ""
        )
        for row, size, recomputed in rows_with_bytes(spec.model, kind, DtypesAndGroups.from_spec(spec), profile):
            source = "recomputed" if recomputed else f"plan/memory/saved_activations.py, {_SHARDING[row.sharding]}"
            yield Constant(f"bytes per token saved by a {name}: {row.name}", size, source)
        peak = saved_bytes(spec.model, kind, DtypesAndGroups.from_spec(spec), profile).backward_peak
        yield Constant(f"bytes per token of gradients, backward of a {name}", peak, "plan/memory/saved_activations.py")


def _memory_assumptions(spec: RunSpec, profile: MemoryProfile) -> Iterator[Constant]:
    """Yield the constants of the memory model of this project's engine."""
    sharding = "engine/parallel/fsdp.py"
    yield Constant("bytes per main parameter, sharded by data_sharding", main_param_bytes(spec), sharding)
    yield Constant("layers all-gathered at once by optim_grads_params", GATHERED_LAYERS, sharding)
    logit, pending = profile.logit_bytes, profile.pending_logit_bytes or 0.0
    if profile.fused_loss:
        logit, pending = float(dtype_bytes(spec.precision.compute_dtype)), 0.0
    yield Constant("bytes per logit, backward of the loss", logit, "engine/train/loss.py")
    yield Constant("bytes per pending logit of a pipeline, in addition to the logit", pending, "engine/train/loss.py")
    yield Constant(
        "fp32 copies of scores in attention without a fused kernel",
        profile.score_copies,
        "engine/model/attention/online_softmax.py",
    )


def _chip_assumptions(spec: RunSpec, chip: ChipFacts) -> Iterator[Constant]:
    source = "data sheet (platform/chips.py)"
    for name, flops in chip.peak_flops.items():
        yield Constant(f"{chip.name}: dense peak in {name}, TFLOP/s", flops / 1e12, source)
    for name, value in (
        ("memory, GB", chip.memory_bytes),
        ("memory bandwidth, GB/s", chip.memory_bandwidth),
        ("link within a node, one direction, GB/s", chip.link_bandwidth),
        ("network per device, one direction, GB/s", chip.network_bandwidth),
        ("host memory, one direction, GB/s", chip.host_bandwidth),
    ):
        if value is not None:
            yield Constant(f"{chip.name}: {name}", value / 1e9, source)
    if spec.cluster.node_bandwidth:
        yield Constant("network per device as given, GB/s", spec.cluster.node_bandwidth, "cluster.node_bandwidth")
    if spec.cluster.site_bandwidth and spec.cluster.sites > 1:
        yield Constant("link of a site as given, GB/s", spec.cluster.site_bandwidth, "cluster.site_bandwidth")
