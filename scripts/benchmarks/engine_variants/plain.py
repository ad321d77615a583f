"""The decoder in plain torch modules, and torch's own ways to lay it out: DTensor styles and FSDP2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from engine_variants.shape import EPSILON, FFN, GROUPS, HEAD_DIM, HEADS, HIDDEN, LAYERS, THETA, VOCABULARY, weights


class Attention(nn.Module):
    """Grouped-query attention; works with as many heads as its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, GROUPS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (t * cos + torch.cat((-t[..., HEAD_DIM // 2 :], t[..., : HEAD_DIM // 2]), -1) * sin for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN, EPSILON), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(HIDDEN, EPSILON), MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class PlainDecoder(nn.Module):
    """Tokens [B, S] -> logits [B, S, V], with our names and initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})
        self.norm = nn.RMSNorm(HIDDEN, EPSILON)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.load_state_dict(dict(weights()))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = (f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def with_dtensor_styles(model: PlainDecoder, mesh: DeviceMesh) -> PlainDecoder:
    """Tensor and sequence parallelism by `parallelize_module`, as torch's tutorial and torchtitan write it."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "attention.q_proj": ColwiseParallel(),
                "attention.k_proj": ColwiseParallel(),
                "attention.v_proj": ColwiseParallel(),
                "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def with_fsdp2(model: PlainDecoder, mesh: DeviceMesh, dtype: torch.dtype) -> PlainDecoder:
    """One unit a layer and one for the rest."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
