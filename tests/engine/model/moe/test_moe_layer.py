"""A mixture-of-experts block against transformers' classes: outputs, and gradients of the input and every weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megalaunch.engine.model.config import MLPConfig, MoEConfig
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.tp_region import NO_TP

transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH = 32, 16
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A block of transformers with random weights, our config of it, and its weights or gradients by our names."""

    theirs: nn.Module
    config: MoEConfig
    rename: Callable[[Weights], Weights]
    bias: str | None = None


def fused(weights: Weights) -> Weights:
    """Mixtral, Qwen-MoE and DeepSeek: gate above up in one matrix."""
    gate, up = weights["experts.gate_up_proj"].chunk(2, dim=1)
    renamed = {
        "router.weight": weights["gate.weight"],
        "experts.gate_proj.weight": gate,
        "experts.up_proj.weight": up,
        "experts.down_proj.weight": weights["experts.down_proj"],
    }
    shared = {
        name.replace("shared_expert.", "shared_experts."): value
        for name, value in weights.items()
        if name.startswith("shared_")
    }
    return renamed | shared


def gpt_oss(weights: Weights) -> Weights:
    """gpt-oss: gate and up interleaved, [in, out]."""
    return {
        "router.weight": weights["router.weight"],
        "router.bias": weights["router.bias"],
        "experts.gate_proj.weight": weights["experts.gate_up_proj"][..., ::2].transpose(1, 2),
        "experts.up_proj.weight": weights["experts.gate_up_proj"][..., 1::2].transpose(1, 2),
        "experts.down_proj.weight": weights["experts.down_proj"].transpose(1, 2),
        "experts.gate_proj.bias": weights["experts.gate_up_proj_bias"][..., ::2],
        "experts.up_proj.bias": weights["experts.gate_up_proj_bias"][..., 1::2],
        "experts.down_proj.bias": weights["experts.down_proj_bias"],
    }


def mixtral(top_k: int = 2) -> Family:
    from transformers.models.mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    theirs = MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=4, num_experts_per_tok=top_k)
    config = MoEConfig(num_experts=4, top_k=top_k, expert=MLPConfig(width=WIDTH))
    return Family(MixtralSparseMoeBlock(theirs), config, fused)


def qwen3(normalize: bool = True) -> Family:
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    theirs = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=normalize,
    )
    config = MoEConfig(num_experts=8, top_k=3, expert=MLPConfig(width=WIDTH), normalize_top_k=normalize)
    return Family(Qwen3MoeSparseMoeBlock(theirs), config, fused)


def qwen2() -> Family:
    from transformers.models.qwen2_moe import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    theirs = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    )
    config = MoEConfig(
        num_experts=4,
        top_k=2,
        expert=MLPConfig(width=WIDTH),
        shared_experts=MLPConfig(width=24),
        shared_expert_gate=True,
        normalize_top_k=False,
    )
    return Family(Qwen2MoeSparseMoeBlock(theirs), config, fused)


def deepseek() -> Family:
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    config = MoEConfig(
        num_experts=8,
        top_k=4,
        expert=MLPConfig(width=WIDTH),
        shared_experts=MLPConfig(width=2 * WIDTH),
        score="sigmoid",
        scaling_factor=2.5,
        balance_bias=True,
        num_groups=4,
        top_k_groups=2,
        group_score_top_k=2,
    )
    return Family(DeepseekV3MoE(theirs), config, fused, bias="gate.e_score_correction_bias")


def gpt_oss_block() -> Family:
    from transformers.models.gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    theirs = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.5
    )
    expert = MLPConfig(width=WIDTH, activation="quick_geglu", clamp=0.5, bias=True)
    config = MoEConfig(num_experts=4, top_k=2, expert=expert, router_bias=True)
    return Family(GptOssMLP(theirs), config, gpt_oss)


FAMILIES = {
    "mixtral": mixtral,
    "all experts": lambda: mixtral(top_k=4),
    "qwen3": qwen3,
    "not normalized": lambda: qwen3(normalize=False),
    "qwen2": qwen2,
    "deepseek": deepseek,
    "gpt-oss": gpt_oss_block,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(name):
    torch.manual_seed(0)
    family = FAMILIES[name]()
    for parameter in family.theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MoELayer(HIDDEN, family.config, NO_TP, LocalDispatcher(family.config.num_experts))
    renamed = dict(family.rename(family.theirs.state_dict()))
    if family.bias is not None:
        bias = family.theirs.get_buffer(family.bias).normal_(std=0.2)
        renamed["router.expert_bias"] = bias.clone()
    ours.load_state_dict(renamed)
    x = torch.randn(2, 9, HIDDEN)
    upstream = torch.randn(2, 9, HIDDEN)

    def run(block):
        leaf = x.clone().requires_grad_()
        out = block(leaf)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(upstream)
        return out.detach(), leaf.grad

    for found, expected in zip(run(ours), run(family.theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected = family.rename({name: parameter.grad for name, parameter in family.theirs.named_parameters()})
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
