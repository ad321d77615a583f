"""A block of experts in several implementations with the same weights: ours, a loop, transformers' Mixtral."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_variants.shape import HIDDEN, Work
from megalaunch.engine.model.build import make_decoder_config
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.schema import RunSpec, with_values

EXPERTS, TOP_K = 8, 2


@dataclass(frozen=True)
class ExpertsWork(Work):
    """The model of `Work` with experts of width `width` in every layer. A sample is the same in every layout."""

    width: int

    def spec(self, **parallel: object) -> RunSpec:
        """A resolved run of it."""
        experts = {"num_experts": EXPERTS, "top_k": TOP_K, "ffn_hidden_size": self.width, "balance_loss": "none"}
        return with_values(super().spec(**parallel), {f"model.moe.{key}": value for key, value in experts.items()})

    def batch(self, share: int = 0) -> tuple[Tensor, Tensor]:
        """Random inputs and labels [samples, tokens] of one data-parallel share; the same every step."""
        first = share * self.samples
        samples = [Work(1, self.tokens, self.precision).batch(first + one) for one in range(self.samples)]
        inputs, labels = zip(*samples, strict=True)
        return torch.cat(inputs), torch.cat(labels)


class StackedLoop(nn.Module):
    """The usual loop: for each expert its tokens, by a mask, and its matrices, by a number."""

    def __init__(self, router: Tensor, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.router, self.gate_up, self.down = nn.Parameter(router), nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        tokens = x.flatten(0, 1)
        weights, chosen = _route(tokens, self.router)
        y = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], self.gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[expert])
            y.index_add_(0, token, out * weights[token, choice, None])
        return y.view_as(x)


class ModuleLoop(nn.Module):
    """The same loop, with three linear layers for each expert."""

    def __init__(self, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.router = nn.Parameter(router)
        matrices = zip(gate, up, down, strict=True)
        self.experts = nn.ModuleList(nn.ParameterList(matrix.clone() for matrix in each) for each in matrices)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        tokens = x.flatten(0, 1)
        weights, chosen = _route(tokens, self.router)
        y = torch.zeros_like(tokens)
        for expert, (gate, up, down) in enumerate(self.experts):
            token, choice = torch.where(chosen == expert)
            rows = tokens[token]
            out = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            y.index_add_(0, token, out * weights[token, choice, None])
        return y.view_as(x)


def _route(tokens: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token, [T, k]."""
    scores = F.softmax(F.linear(tokens, router), dim=-1)
    weights, chosen = scores.topk(TOP_K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def grouped(work: ExpertsWork) -> MoELayer:
    """The engine's block, with random weights."""
    moe = make_decoder_config(work.spec().model).moe
    assert moe is not None
    block = MoELayer(HIDDEN, moe, NO_TP, LocalDispatcher(EXPERTS))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def blocks(work: ExpertsWork) -> dict[str, nn.Module]:
    """All implementations with the weights of the first; transformers' as a block alone and in a model compute."""
    torch.manual_seed(0)
    ours = grouped(work)
    assert ours.experts.gate_proj is not None
    router = ours.router.weight.detach().clone()
    gate, up, down = (
        part.weight.detach().clone() for part in (ours.experts.gate_proj, ours.experts.up_proj, ours.experts.down_proj)
    )
    gate_up = torch.cat([gate, up], dim=1)
    return {
        "ours": ours,
        "loop, stacked weights": StackedLoop(router, gate_up.clone(), down.clone()),
        "loop, a module an expert": ModuleLoop(router, gate, up, down),
        "transformers, eager": _mixtral("eager", work, router, gate_up, down),
        "transformers, grouped_mm": _mixtral("grouped_mm", work, router, gate_up, down),
    }


def transformers_defaults() -> tuple[str, str]:
    """What transformers computes experts by when nothing is asked for: in a block built alone, and in a model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=8, num_local_experts=2)
    alone = config._experts_implementation or "eager"  # None calls the block's own forward
    return alone, MixtralForCausalLM(config).config._experts_implementation


def _mixtral(implementation: str, work: ExpertsWork, router: Tensor, gate_up: Tensor, down: Tensor) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=work.width, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    block.load_state_dict({"gate.weight": router, "experts.gate_up_proj": gate_up, "experts.down_proj": down})
    return block
