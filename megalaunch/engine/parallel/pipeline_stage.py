"""Pipeline stages: that of torch, with the changes that this engine needs, for each torch from 2.11.

The classes override private methods of `torch.distributed.pipelining`, which has no public hooks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.pipelining._utils as pipelining
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo
from torch.torch_version import TorchVersion

from megalaunch.engine.parallel.pipeline_sharding import ShardedStage
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, Phase, StepObserver
from megalaunch.engine.torch_private import accumulate_fsdp_grads

_BackwardResult = tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]
"""Gradients of the inputs, and what torch keeps for the pass for weights."""


@dataclass(frozen=True)
class StageActivations:
    """Shape [B, s, H] and dtype of the activations that a stage sends to the next one."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ObservedStage(PipelineStage):
    """Pipeline stage that reports its phases, and need not ask its neighbours for the shape of activations.

    Args:
        part: The stage's part of the decoder.
        number: Number of the stage.
        stages: Number of stages of the pipeline.
        device: Device of the stage.
        group: Process group of the pp axis.
        observer: Gets the phases of backward passes, sends and receives.
        activations: What each stage sends to the next one; None: ask the neighbours in the first step. A simulated
            rank has no neighbours to ask.
    """

    def __init__(
        self,
        part: nn.Module,
        number: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        observer: StepObserver = NO_OBSERVER,
        activations: Sequence[StageActivations] | None = None,
    ) -> None:
        super().__init__(part, number, stages, device, group=group)
        self._observer, self._activations = observer, activations

    def skip_warmup(self) -> bool:
        """Mark the stage as one that finds out its shapes alone; returns False if it must ask its neighbours.

        Neighbours first vote on whether any of them must ask. From torch 2.14 on a simulated rank, whose neighbours
        cannot vote, refuses to; before, it counted their silence as a yes.
        """
        if self._activations is None:
            return False
        self._inference_mode = pipelining.InferenceMode.DYNAMIC
        return True

    def _recv_meta(self, src_stage: int) -> Any:
        if self._activations is None:
            return super()._recv_meta(src_stage)
        sent, forward = self._activations[min(src_stage, self.stage_index)], src_stage < self.stage_index
        shape = torch.Size(sent.shape)
        stride = torch.empty(shape, device="meta").stride()
        meta = pipelining._TensorMeta(shape=shape, stride=stride, dtype=sent.dtype, requires_grad=forward)
        return pipelining._StageForwardMeta((meta,)) if forward else pipelining._StageBackwardMeta((meta,))

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        if self._activations is None:
            super()._send_meta(meta, dst_stage)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of activations."""
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), "forward")

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of activations."""
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), "forward")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of gradients."""
        return self._tagged(super().get_bwd_recv_ops(bwd_chunk_id), "backward")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of gradients."""
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), "backward")

    def _tagged(self, operations: list[dist.P2POp], phase: Phase) -> list[dist.P2POp]:
        self._observer.tag_p2p(operations, phase)
        return operations

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run torch's backward, then detach the loss in place.

        The schedule holds all losses: undetached, each would hold its graph and with it the input of the stage.
        """
        with self._observer.phase_scope("backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run torch's backward for the gradients of weights, the second half of a zero-bubble schedule's backward."""
        with self._observer.phase_scope("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> _BackwardResult:
        """Run a full backward pass, or that for inputs, or that for weights; a sharded stage reduces its gradients."""
        if isinstance(self.submod, ShardedStage):
            self.submod.begin_backward(backward_type, last_backward)
            result = self._run_backward(backward_type, bwd_kwargs, last_backward)
            self.submod.end_backward(backward_type, last_backward)
            return result
        result = self._run_backward(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight" and isinstance(self.submod, FSDPModule):
            for unit in self.submod.modules():
                if isinstance(unit, FSDPModule):
                    accumulate_fsdp_grads(unit, begun=False)
        return result

    def _run_backward(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool) -> _BackwardResult:
        result: _BackwardResult = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the stage's gradients over data-parallel ranks, after its last backward pass."""
        with self._observer.phase_scope("backward"):
            super().perform_reduce_grad(grad_scale_factor)


class LazyRecvStage(ObservedStage):
    """Pipeline stage with lazily allocated receive buffers of activations and gradients.

    Before 2.15 torch's `PipelineStage` allocates buffers for all microbatches at once and holds them: with 200
    microbatches they take more memory than everything else. Here a buffer is allocated when its recv is posted, and the
    stage drops its reference when the received tensor is read.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        _repeat_without_buffers(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        _repeat_without_buffers(self.grad_recv_info, num_microbatches)

    def _get_recv_ops(self, recv_infos: tuple[Any, ...], *group: Any) -> list[Any]:
        """Return the receives; `group` is given from torch 2.14 on."""
        for info in recv_infos:
            self._allocate_buffer(info)
        return super()._get_recv_ops(recv_infos, *group)

    def _allocate_buffer(self, info: Any) -> None:
        if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
            meta = info.tensor_meta
            info.buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _free_buffers(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _free_buffers(self.grad_recv_info[bwd_chunk_id])
        return found


def _repeat_without_buffers(infos: dict[int, tuple[Any, ...]], microbatches: int) -> None:
    _free_buffers(infos[0])
    for microbatch in range(1, microbatches):
        infos[microbatch] = tuple(copy(info) for info in infos[0])


def _free_buffers(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None


class SplitBackwardStage(LazyRecvStage):
    """Pipeline stage of torch before 2.13, with the two backward passes of zero-bubble schedules mended.

    There torch's pass for inputs ends with an error if a stage has an argument that is no tensor, and does not keep the
    graph of autograd functions written in Python. Its pass for weights counts a gradient twice where one node whose
    gradient was kept leads to another, and torch 2.11 adds up the gradients of a node's outputs.
    """

    def _run_backward(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool) -> _BackwardResult:
        if backward_type == "weight":  # the pass for inputs has told FSDP2 already not to reduce gradients
            for group in bwd_kwargs["param_groups"]:
                _add_weight_grads(group)
            return (), None
        if backward_type == "full":
            return super()._run_backward(backward_type, bwd_kwargs, last_backward)
        tensors = [value for value in bwd_kwargs["input_values"] if isinstance(value, Tensor)]
        # The nodes of autograd functions written in Python do not keep their graph, which the pass for weights needs.
        graph = [get_gradient_edge(output) for output in bwd_kwargs["stage_output"] if output.requires_grad]
        grads, groups = super()._run_backward(backward_type, bwd_kwargs | {"input_values": tensors}, last_backward)
        for group in groups or ():
            group["graph"] = graph
        return grads, groups


def _add_weight_grads(group: dict[str, Any]) -> None:
    """Add to the gradients of a group's weights what follows from the gradients that the pass for inputs kept.

    Args:
        group: torch's `param_groups` entry: the nodes "intermediates", at which the backward of weights leaves that of
            inputs, the gradients "grads" of their outputs, and the nodes "params" that accumulate weights' gradients.
            The first two are removed from it.
    """
    nodes, grads = list(group.pop("intermediates")), group.pop("grads", ())
    kept = [(node, kept) for node, kept in zip(nodes, grads, strict=False) if kept is not None]
    edges = [
        (GradientEdge(node, number), grad)
        for node, of_outputs in kept
        for number, grad in enumerate(of_outputs)
        if grad is not None
    ]
    if not edges:
        return
    # What was kept of a node is its whole gradient: what reaches it from another node of the group is part of that.
    hooks = [node.register_prehook(lambda _, whole=whole: whole) for node, whole in kept] if len(kept) > 1 else []
    try:
        found = torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(node, 0) for node in group["params"]],
            [grad for _, grad in edges],
        )
    finally:
        for hook in hooks:
            hook.remove()
    for node, grad in zip(group["params"], found, strict=True):
        weight = node.variable
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


class KnownShapesStage(SplitBackwardStage):
    """Pipeline stage of torch 2.11, which is told the shape of all activations.

    torch 2.11 would find them out by a forward pass that draws random numbers, and exchange them as pickled tensors,
    which the engine's unpickler refuses.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the first exchange with neighbours. A rank of two neighbours sends nothing to itself: gloo cannot."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]

    def _shape_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        if self.is_first:
            self.inputs_meta = tuple(argument.to("meta") for argument in args)
        else:
            self.inputs_meta = (self._empty(self.stage_index - 1, torch.device("meta")),)
        self._outputs_meta = (self._empty(self.stage_index, torch.device("meta")),)
        return ()

    def _empty(self, sender: int, device: torch.device) -> Tensor:
        """Return an uninitialized tensor like the activations that a stage sends."""
        assert self._activations is not None, "required with torch 2.11"
        sent = self._activations[sender]
        return torch.empty(sent.shape, dtype=sent.dtype, device=device)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        if not self.is_last:  # its output goes to the loss
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]  # newer versions have none

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(1, *args, **kwargs)
        _repeat_without_buffers(self.args_recv_info, num_microbatches)
        return prepared

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        _repeat_without_buffers(self.grad_recv_info, num_microbatches)
        return prepared

    def _allocate_buffer(self, info: Any) -> None:
        if isinstance(info, _RecvInfo):
            source = cast(int, info.source)
            forward = source < self.stage_index
            info.buffer = self._empty(min(source, self.stage_index), self.device).requires_grad_(forward)

    def clear_runtime_states(self) -> None:
        """Drop what the last step has left. Receive buffers, whose gradients torch would clear, are dropped already."""
        self.fwd_cache.clear()
        self.output_chunks.clear()


def stage_class(version: str) -> type[ObservedStage]:
    """Return the class of the engine's pipeline stages with a version of torch."""
    if TorchVersion(version) < "2.12":
        return KnownShapesStage
    if TorchVersion(version) < "2.13":
        return SplitBackwardStage
    # torch 2.15 allocates receive buffers when a recv is posted, and hands them to the stage that reads them.
    return ObservedStage if hasattr(_RecvInfo, "allocate_buffer") else LazyRecvStage


STAGE = stage_class(torch.__version__)
INFERS_ACTIVATIONS = STAGE is not KnownShapesStage
"""Whether the shapes of activations need not be given."""
