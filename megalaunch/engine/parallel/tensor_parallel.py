"""Tensor and sequence parallelism: column- and row-parallel linear layers, and the collectives at a region's ends.

Megatron's scheme (Shoeybi et al. 2019; Korthikanti et al. 2022 for sequence parallelism). Outside a region
each rank holds all S tokens of a sequence, or with sequence parallelism its shard of s = S / tp tokens. With sequence
parallelism a region starts with an all-gather and ends with a reduce-scatter along S; without it only the end
communicates, by an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalaunch.engine.autograd import apply_function, apply_tuple_function
from megalaunch.engine.collectives import AsyncCollective, all_gather_async, all_reduce_async, reduce_scatter_async
from megalaunch.engine.dtensor import shard_param
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.linear import LibraryLayer, Linear
from megalaunch.engine.parallel.tp_overlap import AllGatherMatmulRing, MatmulReduceScatterRing
from megalaunch.engine.param_layout import ParamLayout, get_param_layout, local_or_shared_shard, local_param
from megalaunch.kernels.linear_matmuls import LinearMatmuls, linear_by
from megalaunch.kernels.matmul import needs_grad

_SEQUENCE = 1  # the dim of S in [B, S, H]


@dataclass
class TensorParallel:
    """The tensor-parallel region of one rank (`TPRegion`). All modules of a model share this object."""

    axis: Axis
    sequence_parallel: bool
    overlap: bool = False  # rings of tp_overlap.py; needs sequence parallelism

    @property
    def vocab_axis(self) -> Axis:
        """The axis that shards the vocabulary of embedding, head and logits."""
        return self.axis

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """Embed token ids, [B, S] -> [B, s, H]: each rank looks up its vocabulary shard, then ranks are summed."""
        assert isinstance(embedding.weight, Tensor)
        table = local_param(embedding.weight)
        rows = tokens_BS - self.axis.rank * table.shape[0]
        mine = (rows >= 0) & (rows < table.shape[0])
        vectors = F.embedding(rows.where(mine, 0), table) * mine.unsqueeze(-1)
        return self._sum(vectors)

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """Apply projections that share their input: [B, s, H] -> [B, S, f] each."""
        weights = [self.local_param(p.weight, p.layout) for p in projections]
        outputs: tuple[Tensor, ...]
        library = self._library(projections[0], x_BsH)
        if library is None and projections[0].library is not None:
            x_BsH = projections[0].library.normalize_input(x_BsH)
        if library is not None:
            outputs = library(x_BsH, *weights)
        elif self.overlap and self.sequence_parallel:
            outputs = apply_tuple_function(AllGatherMatmulRing, x_BsH, self.axis, *weights)
        else:
            matmuls = tuple(p.matmuls for p in projections)
            outputs = apply_tuple_function(
                _ColumnParallelLinearFn, x_BsH, self.axis, self.sequence_parallel, matmuls, *weights
            )
        return tuple(
            out if p.bias is None else out + self.local_param(p.bias, p.bias_layout)
            for out, p in zip(outputs, projections, strict=True)
        )

    def gather_from_sequence_parallel_region(self, x_BsH: Tensor) -> Tensor:
        """All-gather the sequence: [B, s, H] -> [B, S, H]. Backward: reduce-scatter of the partial gradients."""
        return apply_function(_GatherFromSP, x_BsH, self.axis, self.sequence_parallel)

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """Apply a projection whose input features are sharded, and sum over ranks: [B, S, f] -> [B, s, H]."""
        weight = local_param(projection.weight)
        if (library := self._library(projection, x_BSf)) is not None:
            (total,) = library(x_BSf, weight)
        elif self.overlap and self.sequence_parallel:
            total = apply_function(MatmulReduceScatterRing, x_BSf, self.axis, weight)
        else:
            total = self._sum(linear_by(projection.matmuls, x_BSf, weight))
        return total if projection.bias is None else total + local_param(projection.bias)

    def local_param(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """Return the shard of a parameter that this rank computes with."""
        return local_or_shared_shard(parameter, layout, self.axis.rank, self.axis.size)

    def scatter_to_sp(self, positions: Tensor) -> Tensor:
        """Return this rank's part [..., s] of per-token values [..., S]."""
        return positions.chunk(self.axis.size, dim=-1)[self.axis.rank] if self.sequence_parallel else positions

    def local_heads(self, per_head: Tensor) -> Tensor:
        """Return this rank's part [n] of per-head values [N]."""
        return per_head.chunk(self.axis.size)[self.axis.rank]

    def all_reduce_mean(self, statistic: Tensor) -> Tensor:
        """Average a statistic over ranks, each of which computed it on its shard of the features."""
        return apply_function(_AllReduceMean, statistic, self.axis)

    def local_seq_len(self, length: int) -> int:
        """Return s for S = `length`."""
        return length // self.axis.size if self.sequence_parallel else length

    @contextmanager
    def sequence_parallel_disabled(self) -> Iterator[None]:
        """Disable sequence parallelism within the context, for lengths that tp does not divide (generation)."""
        kept, self.sequence_parallel = self.sequence_parallel, False
        try:
            yield
        finally:
            self.sequence_parallel = kept

    def _library(self, projection: Linear, x: Tensor) -> LibraryLayer | None:
        """Return the layer of a library that computes a projection of x, with the region's collectives."""
        library = projection.library
        if library is None or library.sequence_parallel != self.sequence_parallel or not library.accepts(x):
            return None
        return library

    def _sum(self, partial: Tensor) -> Tensor:
        return apply_function(_ReduceFromTPRegion, partial, self.axis, self.sequence_parallel)


class _ColumnParallelLinearFn(torch.autograd.Function):
    """Column-parallel linear layers that share their input. W_i is this rank's shard of the output features.

    Forward:   y_i = all_gather(x_s) W_i^T
    Backward:  dx_s = reduce_scatter(sum_i dy_i W_i),  dW_i = dy_i^T all_gather(x_s)
    Without sequence parallelism x is whole: no all-gather, and the reduce-scatter is an all-reduce.

    Only the shard x_s is saved for backward. Its all-gather overlaps with the matmul of dx, and the reduction of dx
    with the matmuls of dW. A zero-bubble schedule calls backward twice, for dx and for dW: each call does its half.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        matmuls: tuple[LinearMatmuls, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sequence_parallel, ctx.matmuls = axis, sequence_parallel, matmuls
        ctx.save_for_backward(x, *weights)
        whole = all_gather_async(x, _SEQUENCE, axis).wait() if sequence_parallel else x
        return tuple(each.output(whole, weight) for each, weight in zip(matmuls, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = [needs_grad(ctx, number) for number in range(1, 1 + len(weights))]
        gathering = all_gather_async(x, _SEQUENCE, ctx.axis) if ctx.sequence_parallel and any(wanted) else None
        wants_dx, reducing = needs_grad(ctx, 0), None
        grads = [
            each.prepare(dy, wants_dx and needed) for each, dy, needed in zip(ctx.matmuls, dys, wanted, strict=True)
        ]
        if wants_dx:
            first, *rest = zip(ctx.matmuls, grads, weights, strict=True)
            dx = first[0].input_grad(*first[1:])
            for each, grad, weight in rest:
                dx = each.input_grad(grad, weight, onto=dx)
            reducing = _start_reduce(dx, ctx.axis, ctx.sequence_parallel)
            del dx  # a copy is in flight
        rows = (gathering.wait() if gathering else x).flatten(0, 1)
        gathering = None  # frees the buffer of its parts before the matmuls of dW
        dweights = [
            each.weight_grad(grad, rows) if needed else None
            for each, grad, needed in zip(ctx.matmuls, grads, wanted, strict=True)
        ]
        return reducing.wait() if reducing else None, None, None, None, *dweights


class _GatherFromSP(torch.autograd.Function):
    """All-gather along S in forward; reduce-scatter (or all-reduce) of the partial gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        return all_gather_async(x, _SEQUENCE, axis).wait() if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _start_reduce(gradients[0], ctx.axis, ctx.sequence_parallel).wait(), None, None


class _ReduceFromTPRegion(torch.autograd.Function):
    """Sum of the ranks' partial results: reduce-scatter along S or all-reduce; backward: all-gather or identity."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        return _start_reduce(partial, axis, sequence_parallel).wait()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = dys
        return (all_gather_async(dy, _SEQUENCE, ctx.axis).wait() if ctx.sequence_parallel else dy), None, None


def _start_reduce(partial: Tensor, axis: Axis, sequence_parallel: bool) -> AsyncCollective:
    """Start the sum over ranks: a reduce-scatter along S with sequence parallelism, else an all-reduce."""
    return reduce_scatter_async(partial, _SEQUENCE, axis) if sequence_parallel else all_reduce_async(partial, axis)


class _AllReduceMean(torch.autograd.Function):
    """Mean over ranks. Each rank uses the mean in its own computation, so backward averages the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce_async(part, axis).wait() / axis.size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce_async(gradients[0], ctx.axis).wait() / ctx.axis.size, None


def shard_model_params(model: Decoder, axis_mesh: DeviceMesh) -> None:
    """Replace each parameter of a model on meta by a DTensor over the tp axis, sharded as its ParamLayout says.

    Those of routed experts are not sharded over tp (`shard_expert_params`).
    """
    if axis_mesh.size() == 1:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            layout = get_param_layout(module, name)
            if not layout.expert:
                module.register_parameter(name, shard_param(parameter, layout, axis_mesh))
    model.tie()
