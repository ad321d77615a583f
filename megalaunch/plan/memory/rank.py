"""Bytes of the fullest device of a run, by kind, at the moment when its backward passes begin."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.accounting import ENGINE, Accounting
from megalaunch.plan.memory.in_flight import in_flight
from megalaunch.plan.memory.saved import Formats, SavedBytes, ends_bytes, format_bytes, saved_bytes
from megalaunch.plan.memory.states import states_of
from megalaunch.plan.shares import Chunk, Held, chunks_by_rank, held_by_rank
from megalaunch.plan.topology import Topology


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at its peak; `rank` is the pipeline rank that it belongs to, `parameters` what it holds."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    rank: int
    parameters: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def kinds(self) -> dict[str, float]:
        """Bytes by kind, in the order in which they are shown."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
        return {name: getattr(self, name) for name in names}


def memory_of(spec: RunSpec, accounting: Accounting = ENGINE) -> Memory:
    """Bytes of the device that needs most, of a resolved spec.

    Raises ValueError (StageError among them) where the spec is open or does not divide.
    """
    ranks = memory_by_rank(spec, accounting)
    return max(ranks, key=lambda memory: memory.total)


def memory_by_rank(spec: RunSpec, accounting: Accounting = ENGINE) -> list[Memory]:
    """The same for every pipeline rank."""
    topology, formats = Topology.of(spec), Formats.of(spec)
    ranks = chunks_by_rank(spec)
    held = held_by_rank(spec, topology.tp, topology.ep * topology.etp)
    kinds = {kind for chunks in ranks for chunk in chunks for kind, _ in chunk.kinds}
    saved = {kind: saved_bytes(spec.model, kind, formats, accounting) for kind in kinds}
    ends = ends_bytes(spec.model, formats, accounting)
    return [
        _of_rank(spec, topology, _kept(spec, topology, rank, chunks, saved, ends), held[rank], rank, chunks, accounting)
        for rank, chunks in enumerate(ranks)
    ]


def _of_rank(
    spec: RunSpec,
    topology: Topology,
    kept: float,
    held: Held,
    rank: int,
    chunks: tuple[Chunk, ...],
    accounting: Accounting,
) -> Memory:
    states = states_of(spec, topology, held, accounting)
    tokens = topology.micro_batch_size * spec.batch.sequence_length / topology.cp
    activations = tokens * kept
    losses = sum(chunk.head + chunk.depths for chunk in chunks)
    logits = losses * tokens * accounting.logit_bytes * (spec.model.vocab_size or 0) / topology.tp
    if accounting.deferred_heads:
        logits += losses * tokens * _deferred(spec, topology, accounting)
    # The reduction of embedding and head comes last, when activations and logits are gone.
    buffers = max(states.buffers, states.root_buffers - activations - logits)
    parameters = held.dense + held.experts
    return Memory(states.weights, states.gradients, states.optimizer, activations, logits, buffers, rank, parameters)


def _deferred(spec: RunSpec, topology: Topology, accounting: Accounting) -> float:
    """Bytes a token of what the head's late gradient needs: gradients of logits, and the head's inputs."""
    microbatches = min(accounting.deferred_heads, topology.microbatches)
    part = topology.tp if spec.parallel.sequence_parallel else 1
    width = (spec.model.vocab_size or 0) / topology.tp + spec.model.hidden_size / part
    return microbatches * format_bytes(spec.precision.compute) * width


def _kept(
    spec: RunSpec,
    topology: Topology,
    rank: int,
    chunks: tuple[Chunk, ...],
    saved: dict[Layer, SavedBytes],
    ends: float,
) -> float:
    """Bytes for each token of a microbatch: every chunk's layers times its microbatches in flight."""
    alive = in_flight(
        spec.parallel.schedule,
        topology.pp,
        len(chunks),
        rank,
        topology.microbatches,
        spec.parallel.microbatch_group or topology.pp,
    )
    full, offloaded = spec.recompute.granularity == "full", spec.recompute.offload_layers
    left = spec.recompute.num_layers  # of recompute.method=block: the first layers of a rank
    total = again = 0.0
    for chunk, copies in zip(chunks, alive, strict=True):
        for kind, count in chunk.kinds:
            one = saved[kind]
            on_device = max(0, count - offloaded)
            offloaded = max(0, offloaded - count)
            if full:
                kept, live, left = _with_recompute(spec, one, on_device, left)
            else:
                kept, live = one.kept * on_device, one.again
            total += kept * copies
            again = max(again, live)
        if chunk.head:
            total += ends * copies
    return total + again


def _with_recompute(spec: RunSpec, saved: SavedBytes, layers: int, left: int) -> tuple[float, float, int]:
    """Whole layers computed again: bytes kept, bytes alive meanwhile, layers still to recompute."""
    whole = saved.kept + saved.again
    if spec.recompute.method == "block":
        again = min(left, layers)
        return saved.boundary * again + whole * (layers - again), whole if again else 0.0, left - again
    size = spec.recompute.num_layers
    return saved.boundary * -(-layers // size), whole * min(size, layers), left
