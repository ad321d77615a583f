"""All-gathers of fp8 weights in 8 bits (`precision.fp8.param_gather`), through FSDP2's hooks around an all-gather.

With one scale s for a matrix, casting its shards equals casting the matrix. After the all-gather a weight is the value
q / s, rounded to the compute dtype. Casting that again for a matmul gives q and s back: rounding moves q / s by 2^-9 at
most, less than half a step of e4m3, and the largest weight is a number of the compute dtype, which q / s returns to.
So the step computes what it computes without `param_gather`, to the bit in bf16. The amaxes of all weights are computed
together, after each update, by one all-reduce along each axis of shards. A delayed scale may saturate weights: their
histories get these amaxes, not those of the cast weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megalaunch.engine.collectives import all_reduce_max
from megalaunch.engine.dtensor import local_slice
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.moe.experts import GroupedLinear
from megalaunch.engine.precision.amax_history import LayerAmax
from megalaunch.engine.precision.float8 import WEIGHT, Float8Matmuls
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.engine.torch_private import keep_version, local_shard
from megalaunch.kernels.float8_cast import E4M3, scale_from_amax


class Float8ParamGather:
    """The fp8 weights of one model part, their scales, and the hooks of their all-gathers.

    Args:
        layers: The layers that compute in fp8, their matmuls, and with the delayed recipe their histories.
        mesh: The device mesh.
        experts: The experts of this rank before FSDP shards them: which of all.
        dtype: The compute dtype.
    """

    def __init__(self, layers: Sequence[Float8Layer], mesh: Mesh, experts: range, dtype: torch.dtype) -> None:
        dense, grouped = (
            [_GatheredWeight(each, dtype, of) for each in layers if isinstance(each.layer, kind)]
            for kind, of in ((Linear, range(1)), (GroupedLinear, experts))
        )
        self._weights: list[tuple[list[_GatheredWeight], list[Axis]]] = []
        if dense and mesh.fsdp_mesh.shape[-1] > 1:
            self._weights.append((dense, [Axis.from_mesh(mesh.world_mesh, name) for name in ("dp_shard", "tp")]))
        if grouped and mesh.expert_fsdp_mesh.shape[-1] > 1:
            grid = mesh.world_mesh if mesh.expert_mesh is None else mesh.expert_mesh
            names = ("dp_shard",) if mesh.expert_mesh is None else ("edp_shard", "etp")
            self._weights.append((grouped, [Axis.from_mesh(grid, name) for name in names]))
        self._is_fresh = False

    def attach(self) -> None:
        """Attach the hooks to the shards, once they have memory."""
        for weights, _ in self._weights:
            for weight in weights:
                weight.attach()

    def prepare_step(self) -> None:
        """Compute the scales, unless the last update did so: weights were initialized, or loaded. Collective."""
        if not self._is_fresh:
            self.compute_scales()
        self._is_fresh = False

    @torch.no_grad()
    def compute_scales(self) -> None:
        """Compute the scale of every weight from its current values. Collective."""
        self._is_fresh = True
        for weights, axes in self._weights:
            amax = torch.cat([weight.local_amax() for weight in weights])
            for axis in axes:
                amax = all_reduce_max(amax, axis)
            for weight, of_weight in zip(
                weights, torch.split(amax, [weight.matrices for weight in weights]), strict=True
            ):
                weight.amax = of_weight


@dataclass(frozen=True)
class Float8Layer:
    """A layer that computes in fp8: its matmuls, and with the delayed recipe its amax histories."""

    layer: Linear | GroupedLinear
    matmuls: Float8Matmuls | Float8GroupedMatmuls
    delayed: LayerAmax | None


class _GatheredWeight:
    """The weight of one layer: a matrix, or those of `experts`, with a scale each.

    Attributes:
        amax: The largest absolute value of each matrix, over all shards, in the compute dtype.
    """

    def __init__(self, of: Float8Layer, dtype: torch.dtype, experts: range) -> None:
        self._layer, self._matmuls, self._delayed = of.layer, of.matmuls, of.delayed
        self._dtype, self._experts = dtype, experts
        self._shard: Tensor | None = None
        self._here = slice(0, 1)
        self._unsharded: Tensor | None = None
        self.amax: Tensor | None = None

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return len(self._experts)

    def attach(self) -> None:
        """Set the hooks for which FSDP2 looks on the local shard."""
        self._matmuls.weight_amax = self.known_amax
        self._shard = shard = local_shard(self._layer.weight)
        hooks: Any = shard
        hooks.fsdp_pre_all_gather, hooks.fsdp_post_all_gather = self.cast_shard, self.dequantize
        if isinstance(self._layer, GroupedLinear):
            start, count = local_slice(self._layer.weight)[0]
            self._here = slice(start - self._experts.start, start - self._experts.start + count)

    def known_amax(self) -> Tensor:
        """Return the amax of each matrix."""
        assert self.amax is not None, "compute_scales precedes every pass"
        return self.amax

    def scales(self) -> Tensor:
        """Return the scale of each matrix, as its matmuls compute it: in fp32, [matrices]."""
        current, delayed, index = scale_from_amax(self.known_amax(), E4M3), self._delayed, WEIGHT.index
        if delayed is None or not delayed.has_scales:
            return current
        scale = delayed.scale(index).flatten()
        return scale if isinstance(self._layer, Linear) else scale.where(delayed.is_known(index).flatten(), current)

    def local_amax(self) -> Tensor:
        """Return the amax of each matrix in this rank's shard, fp32; 0 where it has no part of it.

        Rounding to the compute dtype keeps the order of values: the largest one before is the largest one after.
        """
        shard = local_shard(self._layer.weight)
        assert shard is self._shard, "the hooks are on another tensor"
        found = shard.new_zeros(self.matrices, dtype=torch.float32)
        if shard.numel():
            amax = shard.abs().reshape(self._here.stop - self._here.start, -1).amax(dim=1)
            found[self._here] = amax.to(self._dtype).float()
        return found

    def cast_shard(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], tuple[torch.Size, Tensor]]:
        """Return this rank's shard as bytes of e4m3, padded as on other ranks, and what `dequantize` needs."""
        assert self._shard is not None, "attach sets it"
        shard, largest, scale_M = self._shard.detach(), torch.finfo(E4M3).max, self.scales()
        scaled = shard.to(self._dtype).float() * scale_M[self._here].view(-1, *[1] * (shard.ndim - 1))
        values = scaled.clamp_(-largest, largest).to(E4M3)
        if shard.shape[1:] == outer_size[1:]:  # sharded along dim 0, perhaps unevenly
            missing = -(-outer_size[0] // mesh.size()) - shard.shape[0]
            values = torch.cat((values, values.new_zeros(missing, *values.shape[1:]))) if missing else values
        return (values.view(torch.uint8),), (outer_size, scale_M)  # bytes: gloo has no fp8

    def dequantize(
        self,
        gathered: Sequence[Tensor],
        metadata: tuple[torch.Size, Tensor],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Turn the gathered shards into the weight in the compute dtype; free the 8-bit values.

        The first call returns the weight, whose memory FSDP2 frees and allocates again; later ones fill it.
        """
        (values,), (size, scale_M) = gathered, metadata
        first = out is None
        if first:
            self._unsharded = torch.empty(size, dtype=dtype, device=values.device)
        weight = self._unsharded
        assert weight is not None, "the first call sets it"
        with keep_version(weight):  # the values are those of the forward pass, for which backward looks
            of_matrices = weight.view(self.matrices, -1)
            of_matrices.copy_(values.view(E4M3).flatten()[: size.numel()].view(self.matrices, -1))
            of_matrices.mul_(scale_M.reciprocal().unsqueeze(1))  # in fp32, rounded once
        values.untyped_storage().resize_(0)  # FSDP2 allocates it again for the next all-gather
        return (weight, (weight,)) if first else None
