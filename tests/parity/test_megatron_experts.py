"""A mixture-of-experts block against megatron-core's own layer: output, auxiliary losses and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks

pytest.importorskip("megatron_model")

from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronMoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_model import WITHOUT_KERNELS, _without_cuda

from megalaunch.engine.model.config import MLPConfig, MoEConfig
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.tp_region import NO_TP

HIDDEN, WIDTH, EXPERTS = 32, 16, 8
BATCH, SEQUENCE = 3, 7
EXPERT = MLPConfig(width=WIDTH)

# Ours and theirs of the same layer.
SOFTMAX = (
    MoEConfig(num_experts=EXPERTS, top_k=2, expert=EXPERT, balance_loss="batch", balance_loss_coeff=0.3),
    {"moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
)
BEFORE_TOP_K = (
    MoEConfig(
        num_experts=EXPERTS,
        top_k=3,
        expert=EXPERT,
        normalize_top_k=False,
        scaling_factor=1.5,
        balance_loss="sequence",
        balance_loss_coeff=0.3,
        z_loss_coeff=0.1,
    ),
    {
        "moe_router_topk": 3,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1,
    },
)
DEEPSEEK = (
    MoEConfig(
        num_experts=EXPERTS,
        top_k=4,
        expert=EXPERT,
        shared_experts=MLPConfig(width=2 * WIDTH),
        shared_expert_gate=True,
        score="sigmoid",
        scaling_factor=2.5,
        balance_bias=True,
        num_groups=4,
        top_k_groups=2,
        group_score_top_k=2,
        balance_loss="sequence",
        balance_loss_coeff=0.3,
    ),
    {
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 2 * WIDTH,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
    },
)
# By position Megatron-LM takes the largest of equal numbers, so that the tokens depend on torch.topk's order of ties.
CAPACITY = (
    replace(SOFTMAX[0], capacity_factor=0.75),
    SOFTMAX[1] | {"moe_expert_capacity_factor": 0.75},
)
LAYERS = {
    "softmax": SOFTMAX,
    "capacity": CAPACITY,
    "softmax before top-k": BEFORE_TOP_K,
    "deepseek": DEEPSEEK,
}
_THEIR_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}


def their_layer(options: dict[str, Any]) -> MegatronMoELayer:
    """Build megatron-core's layer on this one rank."""
    _without_cuda()
    moe_utils.te_general_gemm = None  # a name that only Transformer Engine defines
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=1,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=WIDTH,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather",
        **options,
        **WITHOUT_KERNELS,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    layer = MegatronMoELayer(config, spec.submodules)
    layer.set_layer_number(1)  # whose losses are logged
    return layer


def our_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename their weights or gradients: gate above up in one matrix, one matrix an expert."""
    names = {"router.weight": "router.weight", "shared_experts.gate_weight": "shared_expert_gate.weight"}
    named = {ours: tensors[theirs] for theirs, ours in names.items() if theirs in tensors}
    experts = [f"experts.local_experts.{expert}." for expert in range(EXPERTS)]
    down = torch.stack([tensors[f"{expert}linear_fc2.weight"] for expert in experts])
    gate_up = torch.stack([tensors[f"{expert}linear_fc1.weight"] for expert in experts])
    gate, up = gate_up.chunk(2, dim=1)
    named |= {
        f"experts.{name}_proj.weight": value
        for name, value in zip(("gate", "up", "down"), (gate, up, down), strict=True)
    }
    if "shared_experts.linear_fc1.weight" in tensors:
        gate, up = tensors["shared_experts.linear_fc1.weight"].chunk(2)
        values = (gate, up, tensors["shared_experts.linear_fc2.weight"])
        named |= {
            f"shared_experts.{name}_proj.weight": value
            for name, value in zip(("gate", "up", "down"), values, strict=True)
        }
    return named


def both(config: MoEConfig, options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return what each layer computes with the same weights and input: ours, theirs."""
    torch.manual_seed(0)
    theirs = their_layer(options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = MoELayer(HIDDEN, config, NO_TP, LocalDispatcher(EXPERTS))
    weights = our_names(dict(theirs.state_dict()))
    if config.balance_bias:
        weights["router.expert_bias"] = theirs.router.expert_bias.normal_(std=0.2).clone()
    ours.load_state_dict(weights)
    x_BSH, gradient_BSH = torch.randn(2, BATCH, SEQUENCE, HIDDEN)

    leaf = x_BSH.clone().requires_grad_()
    y_BSH = ours(leaf)
    y_BSH.backward(gradient_BSH)
    sums = ours.router.load.take(x_BSH.device)
    mine = {name: p.grad for name, p in ours.named_parameters()}
    mine |= {"output": y_BSH.detach(), "input": leaf.grad, "counts": sums[:EXPERTS], "balance": sums[-2], "z": sums[-1]}

    leaf = x_BSH.transpose(0, 1).contiguous().requires_grad_()
    y_SBH, _ = theirs(leaf)
    y_SBH.backward(gradient_BSH.transpose(0, 1))
    logged = {name: entry["values"][0] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
    zero = torch.zeros(())
    its = our_names({name: p.grad for name, p in theirs.named_parameters()})
    its |= {"output": y_SBH.detach().transpose(0, 1), "input": leaf.grad.transpose(0, 1)}
    its["balance"] = 0.3 * logged[_THEIR_LOSSES[options["moe_router_load_balancing_type"]]]
    its["z"] = config.z_loss_coeff * logged.get("z_loss", zero)
    its["counts"] = theirs.router.local_tokens_per_expert if config.balance_bias else mine["counts"]
    return [mine, its]


@pytest.mark.parametrize("name", LAYERS)
def test_output_losses_and_gradients_are_megatrons(name):
    ((mine, theirs),) = run_ranks(1, both, *LAYERS[name], any_object=True)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(
            torch.as_tensor(mine[key]).float(),
            torch.as_tensor(value).float(),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, k=key: f"{k}: {text}",
        )
