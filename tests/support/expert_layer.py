"""One layer of experts on two ranks: its output, its gradients, and what it sends and computes in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from oracle import small_spec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.build import make_decoder_config
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.engine.parallel.expert_parallel import AllToAllDispatcher, ExpertBlocks
from megalaunch.plan.topology import Topology

EP2 = {"parallel__dp": 2, "parallel__ep": 2}
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 52}
SHARED = {**MOE, "shared_ffn_hidden_size": 60, "shared_expert_gate": True}


class Trace(TorchDispatchMode):
    """Sends and waits of rows, and matmuls of experts and shared experts, which are told by their widths."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, first = func.overloadpacket.__name__, args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            widths = {size for arg in args if isinstance(arg, torch.Tensor) for size in arg.shape}
            if name in ("all_to_all_single", "wait_tensor"):
                self.events.append("send" if name == "all_to_all_single" else "wait")
            elif "mm" in name and widths & {52, 60}:
                event = "experts" if 52 in widths else "shared"
                self.events += [event] if self.events[-1:] != [event] else []
        return out


def layer_of(moe: dict[str, object]) -> tuple[MoELayer, ExpertBlocks]:
    """A layer with this rank's experts."""
    spec = small_spec(**EP2, model__moe=moe)
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    blocks = ExpertBlocks(mesh.expert_parallel, 4)
    config = make_decoder_config(spec.model)
    torch.manual_seed(0)
    layer = MoELayer(config.hidden_size, config.moe, NO_TP, AllToAllDispatcher(blocks))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    for module in layer.experts.children():
        module.weight = nn.Parameter(module.weight[blocks.first : blocks.first + blocks.num_local].detach().clone())
    return layer, blocks


def step(layer: MoELayer, dispatcher: Any) -> tuple[list[torch.Tensor], list[str], list[str]]:
    """Output and gradients, and the events of forward and backward."""
    layer.dispatcher = dispatcher
    layer.zero_grad()
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 5, layer.router.weight.shape[1], generator=draw).requires_grad_()
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        y.backward(torch.randn(y.shape, generator=draw))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())], forward.events, backward.events
