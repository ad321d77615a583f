"""Keys of config.json that families with experts share: which layers have experts, and the auxiliary loss."""

from __future__ import annotations

from typing import Any, Literal

from megalaunch.importers.huggingface.family import Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec


def read_router(file: ConfigFile, experts_key: str, loss: Literal["batch", "global"] = "batch") -> Values:
    """Read the number of experts, the experts per token, and the auxiliary loss of kind `loss`.

    transformers adds the loss, over all layers together, if `output_router_logits` is true. It changes no logit.
    """
    coeff = file.rate("router_aux_loss_coef", 0.001)
    file.pop("output_router_logits", None)
    return {
        "num_experts": file.integer(experts_key),
        "top_k": file.integer("num_experts_per_tok"),
        "balance_loss": loss if coeff else "none",
        "balance_loss_coeff": coeff,
    }


def write_router(model: ModelSpec, experts_key: str) -> dict[str, Any]:
    """Write the keys of `read_router`."""
    moe = model.moe
    return {
        experts_key: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss_coeff if moe.balance_loss != "none" else 0.0,
    }


def read_expert_layers(file: ConfigFile) -> Values:
    """Read `decoder_sparse_step` (every n-th layer has experts) and `mlp_only_layers` (these have none)."""
    step, layers = file.integer("decoder_sparse_step", 1), file.pop("num_hidden_layers", 0)
    dense = file.pop("mlp_only_layers", None) or []
    if not isinstance(dense, list) or not isinstance(layers, int) or not step:
        file.problems.append(f"config.json: mlp_only_layers is {dense!r:.80}, must be a list of layers or null")
        return {}
    chosen = [index for index in range(min(layers, 100_000)) if index not in dense and (index + 1) % step == 0]
    if not chosen:
        file.problems.append("config.json: mlp_only_layers and decoder_sparse_step leave no layer for experts")
        return {}
    first, every = chosen[0], chosen[1] - chosen[0] if len(chosen) > 1 else max(1, layers - chosen[0])
    if chosen != list(range(first, layers, every)):
        file.problems.append(
            f"config.json: mlp_only_layers {dense!r:.80} is not supported: experts must be in every n-th layer from "
            "some layer on"
        )
    return {"first_k_dense_replace": first, "layer_freq": every}


def write_expert_layers(model: ModelSpec) -> dict[str, Any]:
    """Write the keys of `read_expert_layers`, by a list of the dense layers."""
    dense = [layer.index for layer in list_layers(model) if not layer.experts and not layer.mtp]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def expert_width(model: ModelSpec) -> int:
    """Return the intermediate size of one expert."""
    return model.moe.ffn_hidden_size or model.ffn_hidden_size
