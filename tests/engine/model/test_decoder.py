"""The whole decoder against its definition, written out in float64 with nothing of the engine's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracle import small_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[S, heads, D]: the pair (i, i + D/2) as a complex number, turned by position * theta^(-2i/D)."""
    length, _, size = x.shape
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    speeds = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * speeds
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def logits_by_definition(weights: dict[str, torch.Tensor], config, tokens: torch.Tensor) -> torch.Tensor:
    """[S] token ids -> [S, V]."""
    x = weights["embedding.weight"][tokens]
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for index in range(config.num_layers):
        layer = {
            name.removeprefix(f"layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        h = norm(x, layer["attention_norm.weight"], config.norm.epsilon)
        q, k, v = (
            (h @ layer[f"attention.{n}_proj.weight"].T).unflatten(-1, (-1, config.attention.head_dim)) for n in "qkv"
        )
        q, k = turned(q, config.layers[index].rope.theta), turned(k, config.layers[index].rope.theta)
        heads = []
        for head in range(config.attention.num_heads):
            group = head * config.attention.num_groups // config.attention.num_heads
            scores = q[:, head] @ k[:, group].T / config.attention.head_dim**0.5
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, dim=-1) @ layer["attention.o_proj.weight"].T
        h = norm(x, layer["mlp_norm.weight"], config.norm.epsilon)
        gate, up = (h @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.sigmoid(gate) * gate * up) @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], config.norm.epsilon) @ weights["head.weight"].T


def test_decoder_by_definition():
    model = build_decoder(small_spec(model__init_std=0.5, model__norm_epsilon=0.1).model)
    init_weights(model, 5)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones, which would hide a missing one
            parameter.data.uniform_(0.5, 1.5, generator=random)
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    tokens = torch.randint(0, model.config.vocab_size, (2, 11), generator=random)
    for row, logits in zip(tokens, model(tokens), strict=True):
        expected = logits_by_definition(weights, model.config, row)
        torch.testing.assert_close(logits.detach().double(), expected, rtol=1e-4, atol=1e-4)
