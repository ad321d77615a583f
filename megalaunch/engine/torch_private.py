"""The private names of torch that the engine needs, each with its purpose and with what fails without it.

Other files use no private names; the architecture test refuses them. Three files are excepted: the classes of
parallel/pipeline_schedule.py and pipeline_stage.py override private methods of torch's pipelines, and
hang_dump.py must not import torch. All names exist in torch 2.13, the version of constraints.txt, and in 2.11
where no comment says otherwise. A torch without a name raises an AttributeError or ImportError at its first use.

Modules that take long to import are imported by the functions that need them: generation needs none of them.
"""

from __future__ import annotations

import datetime
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import Shard

# TorchDispatchMode shows every operator of a step to deep plans: there is no public interface for it.
# tree_leaves returns the tensors in nested arguments: there is no public form of it.
__all__ = ["TorchDispatchMode", "tree_leaves"]

# The functional collectives. The public ones wait as soon as their result is used; the engine runs a matmul between
# start and wait. The operators have the same names in every torch since 2.1.
FUNCTIONAL_COLLECTIVES = torch.ops._c10d_functional

# The operator of `Tensor.item()`, to which a simulation gives a result.
READ_SCALAR = torch.ops.aten._local_scalar_dense.default

# The operator that waits for a functional collective and returns its argument, of which torch's rule for fake tensors
# allocates a copy.
WAIT_COLLECTIVE = FUNCTIONAL_COLLECTIVES.wait_tensor.default

# What a dispatch mode receives when the device of a fake tensor is read.
READ_DEVICE = torch.ops.prim.device.default

# The unpickler of object collectives, which the engine replaces by a restricted one: torch has no setting for it.
ObjectUnpickler = distributed_c10d._unpickler


def set_object_unpickler(unpickler: type[Any]) -> None:
    """Make all object collectives of this process use an unpickler."""
    distributed_c10d._unpickler = unpickler


def storage_id(owner: Tensor | torch.UntypedStorage) -> int:
    """Return a number that names a live storage. Data pointers do not: they are 0 for fake tensors."""
    return (owner.untyped_storage() if isinstance(owner, Tensor) else owner)._cdata


def count_holders(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many hold a tensor's storage, the tensor itself, and its Python object: autograd's own conditions."""
    storage = torch._C._storage_Use_Count(storage_id(tensor))
    count_uses: Callable[[], int] = tensor._use_count  # type: ignore[attr-defined]
    return storage, count_uses(), sys.getrefcount(tensor)


def base_of_view(view: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is a view of; None if it is none."""
    return view._base


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which only a call of it runs: there is no public way to ask."""
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator that a dispatch mode receives: its name and its arguments' names."""
    return operator._schema


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """Return the global ranks of the process group in an operator's arguments: its name, or a boxed group."""
    found = group_named(group) if isinstance(group, str) else ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(found))


def group_named(name: str) -> ProcessGroup:
    """Return the process group of a name, as functional collectives take it."""
    from torch._C._distributed_c10d import _resolve_process_group  # there is no public function from name to group

    return _resolve_process_group(distributed_c10d.GroupName(name))


def group_timeouts(group: ProcessGroup) -> list[datetime.timedelta]:
    """Return the timeouts of a group's backends; a backend without one, such as a simulated one, is left out."""
    return [backend.options._timeout for backend in _backends(group)]


def set_group_timeout(group: ProcessGroup, limit: datetime.timedelta) -> None:
    """Set the timeout of a group's backends, which torch's device meshes create with the default."""
    for backend in _backends(group):
        backend._set_default_timeout(limit)


def _backends(group: ProcessGroup) -> list[Any]:
    found: list[Any] = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in found if hasattr(getattr(backend, "options", None), "_timeout")]


def fsdp_placement(mesh: DeviceMesh) -> Callable[[Shard], Any]:
    """Return what makes results of `shard_placement_fn`: FSDP shards a parameter on this mesh, not on the unit's.

    torch 2.11 has no ShardPlacementResult; runs that need it have been refused before (`platform.packages`).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    if mesh.ndim == 1:
        info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    else:
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda placement: ShardPlacementResult(placement, info)


def _fsdp_param_groups(unit: FSDPModule) -> Sequence[Any]:
    """Return the parameter groups of an FSDP unit, one a mesh; torch 2.11 has at most one, by another name."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def set_fsdp_reduction(
    unit: FSDPModule, dtype: torch.dtype, make_reduce_scatter: Callable[[int], Any] | None = None
) -> None:
    """Sum an FSDP unit's gradients over ranks, in a dtype of its own, for each mesh on which it shards parameters.

    FSDP2 sets the dtypes of a parameter group in the first forward pass (`_init_mp_dtypes`): the parameters keep the
    policy's for accumulation, and this hook then sets the group's for the reduce-scatter and the all-reduce.

    Args:
        unit: The unit.
        dtype: Dtype of the reduction. A mesh of one rank reduces nothing, and keeps the policy's.
        make_reduce_scatter: Returns the reduce-scatter for a mesh of so many ranks; None: FSDP2's own.
    """
    for group in _fsdp_param_groups(unit):
        ranks = group.mesh_info.mesh.size()
        if make_reduce_scatter is not None:
            group._reduce_scatter_comm = make_reduce_scatter(ranks)
        if ranks > 1:  # on one rank a factor would copy gradients to divide them by 1
            group.gradient_divide_factor = 1.0
            _set_dtype_of_reduction(group, dtype)


def _set_dtype_of_reduction(group: Any, dtype: torch.dtype) -> None:
    set_policy_dtypes = group._init_mp_dtypes

    def set_dtypes() -> None:
        set_policy_dtypes()
        group._reduce_dtype = dtype

    group._init_mp_dtypes = set_dtypes
    # From torch 2.15 on a partial sum (`widen_fsdp_partial_sum`) is cast to the dtype of the reduction before each one.
    if hasattr(group, "_prepare_partial_reduce_output"):
        prepare = group._prepare_partial_reduce_output

        def prepare_as_it_is(params: Any, sizes: Any, dtype: torch.dtype) -> Any:
            partial = group._partial_reduce_output
            return prepare(params, sizes, dtype if partial is None else partial.dtype)

        group._prepare_partial_reduce_output = prepare_as_it_is


def set_fsdp_async_all_gather(model: FSDPModule, enabled: bool) -> None:
    """All-gather parameters as async operations in call order, not on CUDA streams of FSDP2's own."""
    model._set_unshard_async_op(enabled)


def run_fsdp_post_backward(model: FSDPModule) -> None:
    """Run the callback at the end of FSDP2's backward pass, which reduces all units that are not reduced yet."""
    state: Any = model._get_fsdp_state()
    # From torch 2.15 on the end of a backward pass unsets the mode, which the callback wants set.
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def widen_fsdp_partial_sum(unit: FSDPModule) -> None:
    """HSDP: cast a reduce-scattered gradient that waits for its all-reduce to the parameters' dtype."""
    for group in _fsdp_param_groups(unit):
        if group._partial_reduce_output is not None:
            group._partial_reduce_output = group._partial_reduce_output.to(group.fsdp_params[0].orig_dtype)


def accumulate_fsdp_grads(unit: FSDPModule, *, begun: bool) -> None:
    """Add the unsharded gradients of an FSDP unit to the sums over microbatches, in the dtype of accumulation.

    FSDP2 does so in hooks, which a pass for weights alone does not run, or runs before it has all gradients.

    Args:
        unit: The unit.
        begun: Only of groups that have gradients in that dtype: FSDP2 reduces a group in one buffer of one dtype.
    """
    for group in _fsdp_param_groups(unit):
        parameters: Sequence[FSDPParam] = group.fsdp_params
        if begun and not any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
            continue
        for parameter in parameters:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def fsdp_unsharded_grads(unit: FSDPModule) -> Iterator[Tensor | None]:
    """Yield the unsharded gradients of an FSDP unit, accumulated over microbatches and not yet reduced."""
    for group in _fsdp_param_groups(unit):
        parameters: Sequence[FSDPParam] = group.fsdp_params
        for parameter in parameters:
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):  # exists after the first all-gather
                yield parameter.unsharded_param.grad


def set_default_reduce_scatter(unit: FSDPModule) -> None:
    """Give an FSDP unit FSDP2's own reduce-scatter again."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    for group in _fsdp_param_groups(unit):
        group._reduce_scatter_comm = DefaultReduceScatter()


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor without an operator, which a dispatch mode would see; others unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writing to a tensor does not count as a change, for which backward passes look."""
    autograd: Any = torch.autograd
    context: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return context


def with_local_shard(like: Tensor, shard: Tensor) -> Tensor:
    """Return a DTensor sharded as another one, with a local tensor on any device (`from_local` would move it).

    Of a plain tensor the shard is the whole: it is returned as it is.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return shard
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def make_elastic_agent(
    worker: WorkerSpec, logs: LogsSpecs, shutdown_timeout: int, **settings: Any
) -> LocalElasticAgent:
    """Return torch's elastic agent, which kills workers that have not ended in so many seconds after a signal.

    The agent of torch 2.11 has no setting for the time: it always waits 30 seconds.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    if "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:
        return LocalElasticAgent(worker, logs, shutdown_timeout=shutdown_timeout, **settings)

    class Agent(LocalElasticAgent):
        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *ignored: Any) -> None:
            if self._pcontext:
                self._pcontext.close(death_sig, shutdown_timeout)
            super()._shutdown(death_sig)  # ends the rest; the workers have ended

    return Agent(worker, logs, **settings)


def observe_failed_workers(agent: LocalElasticAgent, observe: Callable[[dict[int, int | None]], None]) -> None:
    """Call `observe` whenever workers of an elastic agent have failed, before the agent restarts them or ends.

    Args:
        agent: The agent, before it runs. All its workers have ended when it sees a failure.
        observe: Takes the exit codes of its workers by rank, negative for a signal: those whose failure the agent saw,
            then the others, which it may have ended itself.
    """
    monitor_workers = agent._monitor_workers

    def monitor(group: WorkerGroup) -> Any:
        result = monitor_workers(group)
        if result.is_failed():
            codes = _exit_codes(agent._pcontext)
            by_rank = {worker.global_rank: codes.get(local) for local, worker in enumerate(group.workers)}
            observe({rank: by_rank[rank] for rank in [*result.failures, *by_rank]})
        return result

    agent._monitor_workers = monitor


def _exit_codes(workers: Any) -> dict[int, int | None]:
    """Return the exit codes of an agent's workers by local rank: those of started commands, or of forked processes."""
    if hasattr(workers, "subprocess_handlers"):
        return {local: handler.proc.returncode for local, handler in workers.subprocess_handlers.items()}
    return {local: process.exitcode for local, process in enumerate(workers._pc.processes)}


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Initialize torch's fake process group, whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def clear_dtensor_cache() -> None:
    """Clear DTensor's cache of sharding decisions, which holds meshes of process groups that were destroyed."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def make_fake_tensor_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and dtypes, and no memory; real tensors may be their inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def device_of_fake(tensor: Tensor) -> torch.device:
    """Return the device that a fake tensor is said to be on, without an operator."""
    device: torch.device = cast("FakeTensor", tensor).fake_device
    return device


@contextmanager
def observe_storage_resize(resized: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Within the context, call `resized` with each storage that is resized, and its new size.

    A resize is no operator, so a dispatch mode does not see it. FSDP2 frees and reallocates all-gathered
    parameters in this way.
    """
    resize_storage = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize_storage(storage, size)
        resized(storage, size)
        return result

    with _patch(torch.UntypedStorage, "resize_", resize):
        yield


@contextmanager
def around_dtensor_shape_inference(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within this context, enter `context` while DTensor infers a shape by an operator on global fake tensors."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    infer_shape: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def infer(*args: Any) -> Any:
        with context():
            return infer_shape(*args)

    with _patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", infer):
        yield


@contextmanager
def _patch(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` within the context. For torch only, where it has no hook."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # inherited
            delattr(owner, name)
