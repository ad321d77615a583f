"""The deep plan of a rank: build the engine, run its steps on fake tensors, report memory and communication."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.optimizer.build import build_optimizer
from megalaunch.engine.parallel.activation_offload import offload_tensor
from megalaunch.engine.parallel.parallelize import TensorReaders, materialize, parallelize_decoder
from megalaunch.engine.simulate.comm_tracker import CommKind, CommTracker
from megalaunch.engine.simulate.fake_world import fake_mesh
from megalaunch.engine.simulate.gpu_ops import (
    CPU_KERNELS,
    GPU_KERNELS,
    KERNELS_WITHOUT_TRITON,
    NoCopyOffload,
    NoHostCopies,
    use_gpu_reduce_scatter,
)
from megalaunch.engine.simulate.group_names import GroupNames
from megalaunch.engine.simulate.memory_tracker import Kind, MemoryTracker, Peak
from megalaunch.engine.simulate.phase_tracker import PhaseTracker
from megalaunch.engine.simulate.report import CollectiveReport, DeepPlan
from megalaunch.engine.simulate.simulated_operators import SimulatedOperators
from megalaunch.engine.simulate.steady_state import enough_microbatches
from megalaunch.engine.simulate.step import (
    busiest_row_counts,
    full_length_documents,
    make_batch,
    make_observed_step,
)
from megalaunch.engine.simulate.tensor_kinds import TensorKinds
from megalaunch.engine.torch_private import make_fake_tensor_mode
from megalaunch.engine.train.forward_backward import stage_activations
from megalaunch.kernels.forms import KernelForms, use_kernel_forms
from megalaunch.plan.attention_backends import has_library_ring
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.memory.loss_chunks import count_loss_chunks, microbatch_tokens
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.plan.topology import Topology
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.packages import lacks_expert_mesh
from megalaunch.platform.platforms import TRITON_DEVICES
from megalaunch.schema import RunSpec, with_values


@dataclass(frozen=True)
class _StepResult:
    """Memory peak and communication of a step with some number of microbatches."""

    peak: Peak
    traffic: dict[CommKind, tuple[int, int]]


def deep_plan(spec: RunSpec, rank: int | None = None, modules: LayerModules = STANDARD_MODULES) -> DeepPlan:
    """Simulate one step of a rank and return its memory peak and its collectives.

    Args:
        spec: a resolved spec.
        rank: the global rank; None: the first rank of the pipeline stage with the highest predicted memory.
        modules: the modules of a layer that replace the standard ones.

    Raises:
        ValueError: the rank is outside the world, or the engine does not support the spec.
        RuntimeError: the process is in a process group already.
    """
    started = time.perf_counter()
    _refuse_libraries(spec)
    spec = with_values(spec, {"train.compile": False})  # the compiler needs tensors with memory
    if spec.parallel.moe_token_dispatcher_type == "flex":  # DeepEP needs a GPU; the rows of experts are as many
        spec = with_values(spec, {"parallel.moe_token_dispatcher_type": "alltoall"})
    topology = Topology.from_spec(spec)
    if topology.has_expert_mesh and (reason := lacks_expert_mesh()) is not None:
        raise ValueError(reason)
    rank = topology.dense_grid.group(0, "pp")[predict_memory(spec).rank] if rank is None else rank
    coordinates = topology.coordinates(rank)
    on_gpu = CHIPS[spec.platform.chip].device != "cpu"
    phases = PhaseTracker()
    with ExitStack() as world:
        mesh = world.enter_context(fake_mesh(topology, rank))
        world.enter_context(_without_collections())
        world.enter_context(use_kernel_forms(_kernels(CHIPS[spec.platform.chip].device)))
        parameters, computed, result = _steps(spec, mesh, modules, phases, on_gpu, world)
        names = GroupNames(topology, rank)
        collectives = tuple(
            CollectiveReport(call.phase, call.kind, names.get(call.ranks), len(call.ranks), count, size)
            for call, (count, size) in result.traffic.items()
            if call.phase != "preparing"
        )
    return DeepPlan(
        rank=rank,
        world=topology.world,
        coordinates=coordinates,
        parameters=parameters,
        microbatches=topology.microbatches,
        computed=computed,
        on_gpu=on_gpu,
        phase=result.peak.phase,
        kinds={str(kind): size for kind, size in result.peak.kinds.items()},
        collectives=collectives,
        seconds=time.perf_counter() - started,
    )


def _refuse_libraries(spec: RunSpec) -> None:
    """Raise ValueError if Transformer Engine, which has no rules for fake tensors, computes layers or attention."""
    if spec.precision.uses_transformer_engine:
        raise ValueError("a step of Transformer Engine cannot be simulated: set precision.fp8.implementation=native")
    if has_library_ring(spec):
        raise ValueError("a ring of Transformer Engine cannot be simulated: set model.attention_backend=auto")


def _kernels(device: str) -> KernelForms:
    """Return the operators that stand for those of a device type."""
    if device == "cpu":
        return CPU_KERNELS
    return GPU_KERNELS if device in TRITON_DEVICES else KERNELS_WITHOUT_TRITON


def _steps(
    spec: RunSpec, mesh: Mesh, modules: LayerModules, phases: PhaseTracker, on_gpu: bool, world: ExitStack
) -> tuple[int, int, _StepResult]:
    """Return the rank's parameter count, the number of microbatches run, and the result for a full step."""
    offload = NoCopyOffload if on_gpu else offload_tensor
    readers = TensorReaders(full_length_documents, offload, busiest_row_counts(spec))
    model = parallelize_decoder(spec, mesh, phases, readers, modules)
    if on_gpu:
        use_gpu_reduce_scatter(model)
    parameters = sum(_local_numel(parameter) for parameter in model.parameters())
    collectives = CommTracker(phases)
    memory = MemoryTracker(phases, (-(-microbatch_tokens(spec) // count_loss_chunks(spec)), _local_vocab(spec, mesh)))
    for mode in (make_fake_tensor_mode(), SimulatedOperators(collectives, memory)):
        world.enter_context(mode)
    world.enter_context(memory.tracking())
    materialize(model, mesh)
    optimizer = build_optimizer(spec, mesh, model, NoHostCopies() if on_gpu else None)
    owners = TensorKinds(model, optimizer)
    owners.claim_moments(memory)
    memory.after_phase = lambda: owners.label(memory)
    activations = stage_activations(spec, mesh.topology)

    last_of_round = min(spec.parallel.outer_steps or 1, spec.train.steps)  # with an outer step, if there are any

    def run(microbatches: int) -> _StepResult:
        gc.collect(0)  # frees the previous step and its tensors: no collection ran since they were made
        step = make_observed_step(spec, mesh, model, optimizer, phases, activations)
        batch = make_batch(spec, mesh, microbatches)
        owners.label(memory)
        collectives.clear()
        memory.begin()
        with phases.phase_scope("optimizer"):
            step.run(last_of_round, batch)
        return _StepResult(memory.peak(), {one.call: (one.count, one.bytes) for one in collectives.traffic})

    total = mesh.topology.microbatches
    for fewer, group in enough_microbatches(spec, mesh.topology):
        first, second = run(fewer), run(fewer + group)
        growth = _per_microbatch_growth(first, second)
        if not any(growth.values()) or growth == _per_microbatch_growth(second, run(fewer + 2 * group)):
            return parameters, fewer + group, _extrapolate(first, second, (total - fewer - group) // group)
        # The two peaks are at different points of the step, so growth is not linear yet: try more microbatches.
    return parameters, total, run(total)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage but between steps: searches amid a step take a fifth of its time, and find no tensors."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _per_microbatch_growth(fewer: _StepResult, more: _StepResult) -> dict[Kind, int]:
    """Return the bytes by kind that the additional microbatches add to the peak."""
    return {kind: size - fewer.peak.kinds[kind] for kind, size in more.peak.kinds.items()}


def _extrapolate(fewer: _StepResult, more: _StepResult, times: int) -> _StepResult:
    """Return the result of a longer step: `more` plus `times` the difference between `more` and `fewer`."""
    kinds = {kind: more.peak.kinds[kind] + times * size for kind, size in _per_microbatch_growth(fewer, more).items()}
    traffic = {}
    for call, (count, size) in more.traffic.items():
        before = fewer.traffic.get(call, (0, 0))
        traffic[call] = count + times * (count - before[0]), size + times * (size - before[1])
    return _StepResult(Peak(more.peak.phase, kinds), traffic)


def _local_numel(parameter: Tensor) -> int:
    """Return the elements of a parameter that this rank computes with: sharded by tp, not by data parallelism."""
    shards = 1
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            shards *= 1 if placement.is_replicate() or name != "tp" else parameter.device_mesh[name].size()
    return parameter.numel() // shards


def _local_vocab(spec: RunSpec, mesh: Mesh) -> int:
    """Return the size of this rank's vocabulary shard, padding included."""
    return vocabulary_rows(spec.model.vocab_size or 0, mesh.tp.size) // mesh.tp.size
