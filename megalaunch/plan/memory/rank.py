"""Memory of the device that needs most, by kind, in the phase of a step with the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups, dtype_bytes
from megalaunch.plan.memory.in_flight import in_flight, waiting_for_weights
from megalaunch.plan.memory.loss import loss_bytes
from megalaunch.plan.memory.model_states import model_states
from megalaunch.plan.memory.param_bytes import MemoryPhase
from megalaunch.plan.memory.phase_states import ModelStates
from megalaunch.plan.memory.profiles import MemoryProfile, profile_for
from megalaunch.plan.memory.saved_activations import SavedBytes, head_bytes, saved_bytes
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.stage_params import DeviceParams, VirtualStage, chunks_by_rank, params_by_rank
from megalaunch.plan.stage_validation import splits_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

LOSS, LAYER, GRAD_REDUCE = "backward of the loss", "backward of a layer", "gradient reduction of a layer"
NEXT_LAYER, LAST_LAYER = "backward of the second layer", "backward of the last layer"
LATER_LAYER, MICROBATCH_END = "backward of a layer of the second microbatch", "end of a microbatch"
LATER_LOSS, TIED = "backward of the loss of the second microbatch", "gradient of the tied embedding"
STEP_END = "last gradient reduction"
UPDATE = "optimizer's update"


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


def predict_memory(spec: RunSpec, profile: MemoryProfile | None = None) -> Memory:
    """Return the memory of the device that needs most, of a resolved spec.

    Args:
        profile: the memory profile; None: that of this project's engine.

    Raises:
        ValueError: the spec is open, or a degree does not divide (StageError for stages).
    """
    ranks = memory_by_rank(spec, profile)
    return max(ranks, key=lambda memory: memory.total)


def memory_by_rank(spec: RunSpec, profile: MemoryProfile | None = None) -> list[Memory]:
    """Return the memory of a device of every pipeline rank."""
    profile = profile or profile_for(spec)
    topology, dtypes = Topology.from_spec(spec), DtypesAndGroups.from_spec(spec)
    ranks = chunks_by_rank(spec)
    params = params_by_rank(spec, topology.tp, topology.ep * topology.etp)
    kinds = {kind for chunks in ranks for chunk in chunks for kind, _ in chunk.kinds}
    saved = {kind: saved_bytes(spec.model, kind, dtypes, profile) for kind in kinds}
    head = head_bytes(spec.model, dtypes, profile)
    by_rank = []
    for rank, chunks in enumerate(ranks):
        activations = _saved_activations(spec, topology, rank, chunks, saved, head)
        if profile.p2p_buffers:
            activations = _add_p2p_buffers(activations, chunks, next(iter(saved.values())).layer_input)
        candidates = _peak_candidates(spec, topology, activations, params[rank], rank, chunks, profile)
        by_rank.append(max(candidates, key=lambda memory: memory.total))
    return by_rank


@dataclass(frozen=True)
class _SavedActivations:
    """Activations of a rank, bytes per token of a microbatch.

    Attributes:
        all: when its backward passes begin.
        layer: of one layer, or of a group of layers that are recomputed together.
        last: of the last layer or group, in its backward.
        recomputed: in addition, during the backward of one layer: its recomputed and prefetched activations.
        gradients: also in addition then: gradients of its activations, and scores.
        freed: of `all` and `recomputed`, those that are freed then, for as many bytes of gradients.
        p2p_gradients: gradients sent to and received from other stages meanwhile.
        in_flight: microbatches in flight of each chunk.
        head_microbatches: microbatches in flight of the chunk with the head.
        freed_head: of `all`, those of the last norm and the head, freed before the backward of layers.
        stream: the gradient of the residual stream.
        weight_gradients: bytes of gradients of a layer's weights that exist at the peak of its backward, not per token.
    """

    all: float
    layer: float
    last: float
    recomputed: float
    gradients: float
    freed: float
    in_flight: tuple[int, ...]
    head_microbatches: int
    freed_head: float
    stream: float
    weight_gradients: float
    p2p_gradients: float = 0.0

    @property
    def num_microbatches(self) -> int:
        """Microbatches in flight, of the chunk that has most."""
        return max(1, *self.in_flight)


def _peak_candidates(
    spec: RunSpec,
    topology: Topology,
    saved: _SavedActivations,
    params: DeviceParams,
    rank: int,
    chunks: tuple[VirtualStage, ...],
    profile: MemoryProfile,
) -> Iterator[Memory]:
    """Yield the memory in each phase that may have the peak of a rank."""
    states = model_states(spec, topology, params, profile, saved.num_microbatches)
    tokens = topology.micro_batch_size * spec.batch.sequence_length / topology.cp
    losses = any(chunk.head for chunk in chunks) * (1 + spec.model.mtp.num_layers)
    loss = loss_bytes(spec, topology, profile, tokens)
    pending = losses * (saved.head_microbatches - 1)
    kept = loss.stage_output if losses else 0.0
    held_logits = losses * tokens * _deferred_head(spec, topology, profile) + pending * loss.pending_logits

    def at(
        phase: str,
        states_in_phase: MemoryPhase,
        activations: float,
        logits: float = 0.0,
        buffers: float = 0.0,
        head_gradients: float = 0.0,
    ) -> Memory:
        return Memory(
            weights=states_in_phase.weights,
            gradients=states_in_phase.gradients,
            optimizer=states.optimizer,
            activations=tokens * activations + head_gradients + pending * loss.pending_gradients,
            logits=logits + held_logits,
            buffers=states_in_phase.buffers + buffers,
            rank=rank,
            parameters=params.dense + params.experts,
            phase=phase,
        )

    if losses:
        logits = loss.logits + (losses - 1) * loss.depth_logits
        gradients = losses * loss.with_logits - loss.not_rounded
        yield at(LOSS, states.loss, saved.all, logits, buffers=loss.buffers, head_gradients=gradients)
        yield at(LOSS, states.loss, saved.all, head_gradients=losses * loss.while_scaling)
        if kept and pending == 0 and topology.microbatches > 1:  # until torch's schedule has the next output
            yield at(LOSS, states.loss, saved.all, logits + kept)
        if states.later_loss is not None and saved.head_microbatches < saved.num_microbatches:
            yield at(LATER_LOSS, states.later_loss, saved.all, logits, loss.buffers, gradients)
    temporary, in_layer = tokens * (saved.gradients + saved.freed), saved.recomputed - saved.freed
    if not states.sums_each_gradient:
        temporary += saved.weight_gradients
    waiting = losses * loss.pending_logits if splits_backward(spec.parallel) else kept  # for the head's gradient
    after_head = saved.all - saved.freed_head
    yield at(LAYER, states.layer, after_head + in_layer, waiting, temporary + tokens * saved.p2p_gradients)
    if states.grad_reduce:
        yield at(GRAD_REDUCE, states.layer, after_head - saved.layer + saved.stream, buffers=states.grad_reduce)
    yield from _later_candidates(at, states, saved, in_layer, temporary, kept)


def _later_candidates(
    at: Callable[..., Memory],
    states: ModelStates,
    saved: _SavedActivations,
    in_layer: float,
    temporary: float,
    kept: float,
) -> Iterator[Memory]:
    """Yield the memory in the phases after the backward of the first layer.

    Args:
        at: returns the memory in a phase, of its name, states, activations per token, and buffers.
        states: the states of the rank.
        saved: its saved activations.
        in_layer: bytes per token that a layer's backward adds to them.
        temporary: bytes of its buffers.
        kept: bytes of logits that a pipeline's last stage keeps until its backward pass ends.
    """
    others = saved.all * (1 - 1 / saved.num_microbatches)  # the activations of other microbatches
    if states.next_layer is not None:
        after_first = saved.all - saved.freed_head - saved.layer
        yield at(NEXT_LAYER, states.next_layer, after_first + in_layer, kept, temporary)
        unfinished = max(0.0, after_first - saved.layer) + saved.stream
        yield at(GRAD_REDUCE, states.next_layer, unfinished, kept, states.layer_gradients)
    if states.last_layer is not None:
        yield at(LAST_LAYER, states.last_layer, others + saved.last - saved.freed, kept, temporary)
    if states.later_layer is not None:
        yield at(LATER_LAYER, states.later_layer, others + in_layer, kept, temporary)
    if states.tied is not None:
        yield at(TIED, states.tied, 0.0)
    if states.microbatch_end is not None:
        yield at(MICROBATCH_END, states.microbatch_end, others)
    yield at(STEP_END, states.step_end, 0.0)
    if states.update is not None:
        yield at(UPDATE, states.update, 0.0)


def _deferred_head(spec: RunSpec, topology: Topology, profile: MemoryProfile) -> float:
    """Return the bytes per token held for the head's deferred gradient: gradients of logits, and the head's inputs."""
    microbatches = min(profile.deferred_head_microbatches, topology.microbatches)
    part = topology.tp if spec.parallel.sequence_parallel else 1
    width = vocabulary_rows(spec.model.vocab_size or 0, topology.tp) / topology.tp + spec.model.hidden_size / part
    return microbatches * dtype_bytes(spec.precision.compute_dtype) * width


def _saved_activations(
    spec: RunSpec,
    topology: Topology,
    rank: int,
    chunks: tuple[VirtualStage, ...],
    saved: dict[Layer, SavedBytes],
    head: float,
) -> _SavedActivations:
    """Sum the saved activations of every chunk's layers, times its microbatches in flight."""
    microbatches = in_flight(
        spec.parallel.schedule,
        topology.pp,
        len(chunks),
        rank,
        topology.microbatches,
        spec.parallel.microbatch_group_size_per_vp_stage or topology.pp,
    )
    full = spec.recompute.granularity == "full"
    total = layer = last = 0.0
    # Recomputed, gradients and freed, of the layer with the largest sum of the first two; and its weights' gradients.
    peak, weight_gradients = (0.0, 0.0, 0.0), 0.0
    head_microbatches, by_chunk = 1, []
    for chunk, count_in_flight in zip(chunks, microbatches, strict=True):
        offloaded, layers = spec.recompute.cpu_offloading_num_layers, sum(count for _, count in chunk.kinds)
        prefetched, stored, whole, outputs = _layers_resident(layers, offloaded), 0.0, 0.0, 0.0
        to_recompute = spec.recompute.num_layers  # by recompute.method=block: the first layers of a stage
        for kind, count in chunk.kinds:
            one = saved[kind]
            on_device = max(0, count - offloaded)
            offloaded = max(0, offloaded - count)
            if full:
                size, recomputed, to_recompute = _full_recompute(spec, one, on_device, to_recompute)
            else:
                size, recomputed = one.saved * on_device, one.recomputed_at_peak
            stored, whole = stored + size, whole + one.without_recompute * on_device
            outputs += one.output_gradients * count
            in_backward = (recomputed + prefetched * one.without_recompute, one.backward_peak, one.freed_at_peak)
            if in_backward[0] + in_backward[1] > peak[0] + peak[1]:
                peak, weight_gradients = in_backward, one.weight_gradients
            layer, last = size / on_device if on_device else 0.0, one.saved + in_backward[0]
            if full:
                group = 1 if spec.recompute.method == "block" else min(spec.recompute.num_layers, count)
                layer, last = layer * group, one.without_recompute * group
        by_chunk.append((whole, stored, outputs))
        total += stored * count_in_flight
        if chunk.head:
            total += head * count_in_flight
            head_microbatches = max(1, count_in_flight)
    stream = max(one.layer_input for one in saved.values())
    freed_head = head * any(chunk.head for chunk in chunks)
    if splits_backward(
        spec.parallel
    ):  # its passes for inputs leave the head's values, and compute no weights' gradients
        peak = _peak_with_waiting_passes(spec, topology, rank, total, by_chunk, peak)
        freed_head = weight_gradients = 0.0
    return _SavedActivations(
        total, layer, last, *peak, microbatches, head_microbatches, freed_head, stream, weight_gradients
    )


def _peak_with_waiting_passes(
    spec: RunSpec,
    topology: Topology,
    rank: int,
    total: float,
    by_chunk: list[tuple[float, float, float]],
    peak: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Add to the peak of a layer's backward what passes for inputs leave for those for weights.

    That are recomputed activations, and gradients of outputs: of one pass while most microbatches are in flight, later
    of several. dualpipev splits only its last passes; on rank 0 they are those of the first stage, which has no inputs
    with gradients: torch's runtime runs its whole backward in the pass for weights.

    Args:
        spec: a resolved spec whose schedule splits the backward pass.
        topology: its topology.
        rank: the pipeline rank.
        total: bytes per token of its saved activations, to which the peak is added.
        by_chunk: of each chunk the bytes of all activations of its layers, those that are saved, and the gradients of
            their projections' outputs.
        peak: recomputed activations, gradients and freed activations of one layer.
    """
    recomputed, gradients, freed = peak
    schedule = spec.parallel.schedule
    if schedule == "dualpipev" and rank == 0:
        return peak
    whole, saved, outputs = max(by_chunk)
    waiting, others = waiting_for_weights(schedule, topology.pp, len(by_chunk), rank, topology.microbatches)
    first = max(recomputed, whole - saved), gradients + outputs, freed
    most = waiting * whole + others * saved - total, gradients + waiting * outputs, freed
    return max(peak if schedule == "dualpipev" else first, most, key=lambda sizes: sizes[0] + sizes[1])


def _layers_resident(layers: int, offloaded: int) -> int:
    """Return the offloaded layers on the device during a backward: the layer in backward and the prefetched one.

    Layers that were never offloaded are freed by then.
    """
    never_offloaded = max(0, layers - offloaded)
    return max(0, min(2, layers) - never_offloaded) if offloaded else 0


def _add_p2p_buffers(
    saved: _SavedActivations, chunks: tuple[VirtualStage, ...], hidden_states: float
) -> _SavedActivations:
    """Add the sent outputs, the gradient received from the next stage and the one sent to the previous."""
    outputs = sum(count for chunk, count in zip(chunks, saved.in_flight, strict=True) if not chunk.head)
    gradients = any(not chunk.head for chunk in chunks) + any(not chunk.embedding for chunk in chunks)
    return replace(saved, all=saved.all + outputs * hidden_states, p2p_gradients=gradients * hidden_states)


def _full_recompute(spec: RunSpec, layer: SavedBytes, layers: int, to_recompute: int) -> tuple[float, float, int]:
    """Return the bytes saved, those allocated in addition during recomputation, and the layers left to recompute.

    For recompute.granularity=full: activation checkpointing of full layers, method block or uniform.
    """
    full = layer.without_recompute
    if spec.recompute.method == "block":
        count = min(to_recompute, layers)
        # Layers that are not recomputed come after the others, and are freed by then.
        recomputed = full - layer.layer_input if count == layers else 0.0
        return layer.layer_input * count + full * (layers - count), recomputed, to_recompute - count
    chunk = min(spec.recompute.num_layers, layers)
    if not chunk:
        return 0.0, 0.0, to_recompute
    return layer.layer_input * -(-layers // chunk), full * chunk - layer.layer_input, to_recompute
