"""The tensors that checkpoint tests save: known values of every kind, and layouts to spread them over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch._dynamo  # DTensor and FSDP2 import it at first use: here once, and not for a second in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPES = {
    "even": ((8, 6), torch.float32),
    "odd": ((5, 3), torch.bfloat16),
    "few": ((2, 4), torch.float32),  # fewer rows than ranks: some own none
    "counts": ((7,), torch.int64),
    "columns": ((3, 8), torch.float16),
    "nothing": ((0, 4), torch.float32),
    "step": ((), torch.float32),
    "seen": ((), torch.int64),
}


def reference() -> dict[str, torch.Tensor]:
    """Random bits, NaN patterns and all, except where an integer must stay one."""
    values = {}
    for index, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(index)
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        values[name] = raw.view(dtype).reshape(shape)
    return values


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes (NaNs included)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def spread(values: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The values as DTensors: `rows` (dim 0 over all), `copies` (2 replicas of 2 shards), `grid` (2 dims cut)."""
    ranks = dist.get_world_size()
    if layout == "rows":
        mesh, rules = init_device_mesh("cpu", (ranks,)), [Shard(0)]
    elif layout == "copies":
        mesh, rules = init_device_mesh("cpu", (2, ranks // 2)), [Replicate(), Shard(0)]
    else:
        mesh, rules = init_device_mesh("cpu", (2, ranks // 2)), [Shard(0), Shard(1)]
    placed = {}
    for name, value in values.items():
        if value.dim() == 0:
            placed[name] = value.clone()  # plain: the same on all ranks
        else:
            fitting = [rule if not rule.is_shard() or rule.dim < value.dim() else Replicate() for rule in rules]
            placed[name] = distribute_tensor(value, mesh, fitting)
    return placed


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layout, with other values."""
    return {name: _blank(tensor) for name, tensor in tensors.items()}


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.full_like(tensor, 3)
    local = torch.full_like(tensor.to_local(), 3)  # as an operator on a DTensor it takes 100 times as long
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def require_reference(tensors: Mapping[str, torch.Tensor]) -> None:
    """Every whole tensor has the reference's bits."""
    for name, value in reference().items():
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert same_bits(whole, value), name


def train_a_step(data: int, tensor: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tiny model under FSDP2 (and tensor shards below it) after one AdamW step with known gradients."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if tensor > 1:
        for layer, dim in ((model[0], 0), (model[1], 1)):
            sharded = distribute_tensor(layer.weight.data, mesh["tp"], [Shard(dim)])
            layer.weight = nn.Parameter(sharded)
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.data, mesh["tp"], [Replicate()]))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5  # elementwise, so the same under every layout
    optimizer.step()
    return model, optimizer


def trained_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and moments by flat name."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors
