"""Memory of the device that needs most, by kind, in the phase of a step with the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalaunch.config.schema import RunSpec
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.in_flight import in_flight
from megalaunch.plan.memory.layer_dims import DtypesAndGroups, dtype_bytes
from megalaunch.plan.memory.loss import loss_bytes
from megalaunch.plan.memory.model_states import MemoryPhase, model_states
from megalaunch.plan.memory.profiles import MemoryProfile, profile_for
from megalaunch.plan.memory.saved_activations import SavedBytes, head_bytes, saved_bytes
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.stage_params import DeviceParams, VirtualStage, chunks_by_rank, params_by_rank
from megalaunch.plan.topology import Topology

LOSS, LAYER, UNIT = "as the loss runs backwards", "as a layer runs backwards", "as a layer's gradients are summed"
LAST, BETWEEN = "as the last layer runs backwards", "as a microbatch ends"
END = "as the last gradients are summed"


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at its peak, which is in `phase`.

    `rank` is its pipeline rank, `parameters` the number of parameters on it.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    rank: int
    parameters: float
    phase: str = ""

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def kinds(self) -> dict[str, float]:
        """Bytes by kind, in display order."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
        return {name: getattr(self, name) for name in names}


def predict_memory(spec: RunSpec, accounting: MemoryProfile | None = None) -> Memory:
    """Return the memory of the device that needs most, of a resolved spec.

    Args:
        accounting: the memory profile; None: that of this project's engine.

    Raises:
        ValueError: the spec is open, or a degree does not divide (StageError for stages).
    """
    ranks = memory_by_rank(spec, accounting)
    return max(ranks, key=lambda memory: memory.total)


def memory_by_rank(spec: RunSpec, accounting: MemoryProfile | None = None) -> list[Memory]:
    """Return the memory of a device of every pipeline rank."""
    accounting = accounting or profile_for(spec)
    topology, dtypes = Topology.from_spec(spec), DtypesAndGroups.from_spec(spec)
    ranks = chunks_by_rank(spec)
    held = params_by_rank(spec, topology.tp, topology.ep * topology.etp)
    kinds = {kind for chunks in ranks for chunk in chunks for kind, _ in chunk.kinds}
    saved = {kind: saved_bytes(spec.model, kind, dtypes, accounting) for kind in kinds}
    ends = head_bytes(spec.model, dtypes, accounting)
    found = []
    for rank, chunks in enumerate(ranks):
        kept = _saved_activations(spec, topology, rank, chunks, saved, ends)
        if accounting.stage_messages:
            kept = _add_p2p_buffers(kept, chunks, next(iter(saved.values())).boundary)
        moments = _peak_candidates(spec, topology, kept, held[rank], rank, chunks, accounting)
        found.append(max(moments, key=lambda memory: memory.total))
    return found


@dataclass(frozen=True)
class _SavedActivations:
    """Activations of a rank, bytes per token of a microbatch.

    Attributes:
        all: when its backward passes begin.
        layer: of one layer.
        working: in addition, during the backward of one layer.
        messages: gradients sent and received between stages meanwhile.
        alive: microbatches in flight of each chunk.
    """

    all: float
    layer: float
    working: float
    alive: tuple[int, ...]
    head_copies: int
    messages: float = 0.0

    @property
    def num_microbatches(self) -> int:
        """Microbatches in flight, of the chunk that has most."""
        return max(1, *self.alive)


def _peak_candidates(
    spec: RunSpec,
    topology: Topology,
    kept: _SavedActivations,
    held: DeviceParams,
    rank: int,
    chunks: tuple[VirtualStage, ...],
    accounting: MemoryProfile,
) -> Iterator[Memory]:
    """Yield the memory in each phase that may have the peak of a rank."""
    states = model_states(spec, topology, held, accounting, kept.num_microbatches)
    tokens = topology.micro_batch_size * spec.batch.sequence_length / topology.cp
    losses = sum(chunk.head + chunk.depths for chunk in chunks)
    loss = loss_bytes(spec, topology, accounting, tokens)
    waiting = losses * (kept.head_copies - 1)
    late = losses * tokens * _deferred(spec, topology, accounting) + waiting * loss.logits_waiting

    def at(
        moment: str,
        phase: MemoryPhase,
        activations: float,
        logits: float = 0.0,
        buffers: float = 0.0,
        beside: float = 0.0,
    ) -> Memory:
        return Memory(
            weights=phase.weights,
            gradients=phase.gradients,
            optimizer=states.optimizer,
            activations=tokens * activations + beside + waiting * loss.formed_waiting,
            logits=logits + late,
            buffers=phase.buffers + buffers,
            rank=rank,
            parameters=held.dense + held.experts,
            phase=moment,
        )

    if losses:
        yield at(LOSS, states.loss, kept.all, losses * loss.logits, beside=losses * loss.beside)
        yield at(LOSS, states.loss, kept.all, beside=losses * loss.scaled)
    yield at(LAYER, states.layer, kept.all + kept.working, buffers=tokens * kept.messages)
    if states.unit:
        yield at(UNIT, states.layer, kept.all - kept.layer, buffers=states.unit)
    if states.last is not None:
        yield at(LAST, states.last, kept.layer + kept.working)
    if states.between is not None:
        yield at(BETWEEN, states.between, kept.all * (1 - 1 / kept.num_microbatches))
    yield at(END, states.end, 0.0)


def _deferred(spec: RunSpec, topology: Topology, accounting: MemoryProfile) -> float:
    """Return the bytes per token held for the head's deferred gradient: gradients of logits, and the head's inputs."""
    microbatches = min(accounting.deferred_heads, topology.microbatches)
    part = topology.tp if spec.parallel.sequence_parallel else 1
    width = vocabulary_rows(spec.model.vocab_size or 0, topology.tp) / topology.tp + spec.model.hidden_size / part
    return microbatches * dtype_bytes(spec.precision.compute_dtype) * width


def _saved_activations(
    spec: RunSpec,
    topology: Topology,
    rank: int,
    chunks: tuple[VirtualStage, ...],
    saved: dict[Layer, SavedBytes],
    ends: float,
) -> _SavedActivations:
    """Sum the saved activations of every chunk's layers, times its microbatches in flight."""
    alive = in_flight(
        spec.parallel.schedule,
        topology.pp,
        len(chunks),
        rank,
        topology.microbatches,
        spec.parallel.microbatch_group_size_per_vp_stage or topology.pp,
    )
    full = spec.recompute.granularity == "full"
    total = working = layer = 0.0
    head_copies = 1
    for chunk, copies in zip(chunks, alive, strict=True):
        offloaded, layers = spec.recompute.cpu_offloading_num_layers, sum(count for _, count in chunk.kinds)
        back = _layers_resident(layers, offloaded)
        left = spec.recompute.num_layers  # layers to recompute by recompute.method=block: the first ones of a stage
        for kind, count in chunk.kinds:
            one = saved[kind]
            on_device = max(0, count - offloaded)
            offloaded = max(0, offloaded - count)
            if full:
                kept, again, left = _add_recompute(spec, one, on_device, left)
            else:
                kept, again = one.kept * on_device, one.again
            total += kept * copies
            working = max(working, again + one.working + back * (one.kept + one.again))
            layer = kept / on_device if on_device else 0.0
        if chunk.head:
            total += ends * copies
            head_copies = max(1, copies)
    return _SavedActivations(total, layer, working, alive, head_copies)


def _layers_resident(layers: int, offloaded: int) -> int:
    """Return the offloaded layers of a stage on the device during a backward: it and the next, less layers freed."""
    here = max(0, layers - offloaded)
    return max(0, min(2, layers) - here) if offloaded else 0


def _add_p2p_buffers(kept: _SavedActivations, chunks: tuple[VirtualStage, ...], stream: float) -> _SavedActivations:
    """Add the outputs that stages hold, the gradient received from the next stage and the one sent to the previous."""
    outputs = sum(copies for chunk, copies in zip(chunks, kept.alive, strict=True) if not chunk.head)
    gradients = any(not chunk.head for chunk in chunks) + any(not chunk.embedding for chunk in chunks)
    return replace(kept, all=kept.all + outputs * stream, messages=gradients * stream)


def _add_recompute(spec: RunSpec, saved: SavedBytes, layers: int, left: int) -> tuple[float, float, int]:
    """Return the bytes saved, the further bytes alive during recomputation, and the layers left to recompute.

    For recompute.granularity=full: activation checkpointing of full layers, method block or uniform.
    """
    whole = saved.kept + saved.again
    if spec.recompute.method == "block":
        again = min(left, layers)
        # Layers that are not recomputed come after the others, and are freed by then.
        meanwhile = whole - saved.boundary if again == layers else 0.0
        return saved.boundary * again + whole * (layers - again), meanwhile, left - again
    size = min(spec.recompute.num_layers, layers)
    if not size:
        return 0.0, 0.0, left
    return saved.boundary * -(-layers // size), whole * size - saved.boundary, left
