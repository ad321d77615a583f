"""Checkpoints as Megatron-LM saves them: megatron-core's own model and writer, on gloo ranks without a GPU."""

from __future__ import annotations

import queue
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_ranks import run_ranks

pytest.importorskip("megatron_model")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_model import WITHOUT_KERNELS, _without_cuda

LENGTH, ROWS = 12, 56
_SHAPE = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
    "padded_vocab_size": ROWS,
    "norm_epsilon": 1e-5,
}
_LLAMA = {
    **_SHAPE,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True,
}
_GATED = {**_LLAMA, "attention_output_gate": True}
_GPT = {
    **_SHAPE,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 4,
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": False,
}
_MIXTRAL = {**_LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
_DEEPSEEK = {
    **_LLAMA,
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
_LATENT = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": 1,
    "add_qkv_bias": False,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 10,
    "rope_type": None,  # YaRN, which rotates whatever --rotary-percent says
    "rotary_scaling_factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 8,
}
_SHAPED_BY_HEADS = ("group_query_attention", "num_query_groups", "add_qkv_bias")
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    "moe_shared_expert_gate": False,
    **_LATENT,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}
_DENSE_LATENT = {
    **_LLAMA,
    **_LATENT,
    "q_lora_rank": None,
    "rope_type": "rope",
    "rotary_percent": 1.0,
    "mscale_all_dim": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gated attention": _GATED,
    "gpt": _GPT,
    "mixtral": _MIXTRAL,
    "deepseek": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK_V3,
    "dense_latent": _DENSE_LATENT,
}
# What a real run keeps beside: classes of its own among plain values.
_BESIDE = {"attention_backend": AttnBackend.auto, "params_dtype": torch.float32, "lr": 1e-4}
TOKENS = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(4))


def save(name: str, folder: Path, ranks: int = 1, stacked: bool = True, singleton: bool = False) -> list[torch.Tensor]:
    """Save a checkpoint of random weights in `folder`; return its logits of TOKENS, the decoder's and each depth's.

    `stacked`: layers are one tensor. `singleton`: experts and halves of gated projections are tensors by themselves.
    """
    folder.mkdir(parents=True)
    return run_ranks(ranks, _save, MODELS[name], folder, stacked, singleton, timeout=120, any_object=True)[0]


def save_with_gradients(name: str, weights: Path, gradients: Path) -> float:
    """Save a checkpoint of random weights, and one of their gradients of the loss of TOKENS; return the mean loss."""
    weights.mkdir(parents=True)
    gradients.mkdir(parents=True)
    return run_ranks(1, _save_gradients, MODELS[name], weights, gradients, timeout=120, any_object=True)[0]


def _save(arguments: dict[str, Any], folder: Path, stacked: bool, singleton: bool) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    model = _random_model(arguments, stacked)
    logits: list[torch.Tensor] = []
    model.output_layer.register_forward_hook(
        lambda *call: logits.append(call[-1][0].clone())
    )  # the loss writes into them
    with torch.no_grad():
        _losses(model.eval())
    _write(model, arguments, folder, stacked, singleton)
    whole = [torch.cat(_from_all(part.contiguous(), ranks), dim=-1).transpose(0, 1) for part in logits]
    return [whole[-1], *whole[:-1]]  # the decoder's logits are computed last


def _save_gradients(arguments: dict[str, Any], weights: Path, gradients: Path) -> float:
    """The part of `save_with_gradients` that runs on a rank."""
    model = _random_model(arguments, stacked=False)
    _write(model, arguments, weights, stacked=False, singleton=False)
    loss = _losses(model.train()).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    _write(model, arguments, gradients, stacked=False, singleton=False)
    return loss.item()


def _random_model(arguments: dict[str, Any], stacked: bool) -> Any:
    """Build a model whose norms and biases, too, are something else than ones and zeros."""
    _without_cuda()
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._get_write_results_queue = lambda *_, **__: results
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = _model(arguments, ranks, stacked)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.empty_like(tensor).uniform_(-0.3, 0.3))
        if ranks > 1:
            _agree(model)
    return model


def _losses(model: Any) -> torch.Tensor:
    """Compute the loss of each token of TOKENS but the first, [B, S - 1]."""
    inputs, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    length = inputs.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    losses: torch.Tensor = model(inputs, torch.arange(length).expand_as(inputs), hidden, labels=labels)
    return losses


def _write(model: Any, arguments: dict[str, Any], folder: Path, stacked: bool, singleton: bool) -> None:
    shared = {"args": Namespace(**arguments, **_BESIDE), "iteration": 7, "checkpoint_version": 3.0}
    metadata = {"non_homogeneous_layers": not stacked, "singleton_local_shards": singleton}
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata), **shared}, str(folder))


def _from_all(part: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part)
    return parts


def _agree(model: Any) -> None:
    """Tensors that all ranks hold whole are those of the first."""
    for parameter in model.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            dist.broadcast(parameter.data, 0)


def _experts(arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a config about experts, whose names are mostly those of the arguments."""
    if "num_experts" not in arguments:
        return {}
    moe_utils.te_general_gemm = None  # a name that only Transformer Engine defines
    named = {name: value for name, value in arguments.items() if name.startswith("moe_")}
    beside = {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    return {"num_moe_experts": arguments["num_experts"], "moe_router_dtype": "fp32", **beside, **named}


class _LatentCoreAttention(DotProductAttention):
    """Its attention without Transformer Engine, with the two widths of heads that only that knows."""

    def __init__(self, *arguments: Any, k_channels: int = 1, v_channels: int = 1, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _layers(config: TransformerConfig, given: Namespace) -> Any:
    """The layers' modules: alike, or dense ones and others with experts."""
    latent = config.multi_latent_attention
    multi_latent_attention.HAVE_TE = False  # it takes a missing Transformer Engine for an installed one
    kinds = {"qk_layernorm": given.qk_layernorm, "normalization": given.normalization}
    if config.num_moe_experts is None:
        layers = get_gpt_layer_local_spec(**kinds, multi_latent_attention=latent)
    else:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=given.normalization)
    for layer in getattr(layers, "layer_specs", [layers]) if latent else ():
        layer.submodules.self_attention.submodules.core_attention = _LatentCoreAttention
    return layers


def _depths(config: TransformerConfig, layers: Any) -> Any:
    """The modules of multi-token prediction."""
    if config.mtp_num_layers is None:
        return None
    MTPLossLoggingHelper.save_loss_to_tracker = lambda *_, **__: None  # asks for data-parallel groups
    return get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)


def _others(arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a config about latent attention and multi-token prediction, with the names of the arguments."""
    latent = (*_LATENT, "rotary_base", "rotary_percent") if "multi_latent_attention" in arguments else ()
    taken = {name: arguments[name] for name in arguments if name.startswith("mtp_") or name in latent}
    if taken.get("rope_type", "") is None:
        del taken["rope_type"]  # Megatron-LM leaves the config's own default
    return {name: value for name, value in taken.items() if name not in _SHAPED_BY_HEADS}


def _model(arguments: dict[str, Any], ranks: int, stacked: bool) -> Any:
    given = Namespace(**arguments)
    latent = arguments.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=given.num_layers,
        hidden_size=given.hidden_size,
        ffn_hidden_size=given.ffn_hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_query_groups if given.group_query_attention else given.num_attention_heads,
        kv_channels=given.kv_channels,
        normalization=given.normalization,
        layernorm_epsilon=given.norm_epsilon,
        gated_linear_unit=given.swiglu,
        activation_func=F.silu if given.swiglu else F.gelu,
        add_bias_linear=given.add_bias_linear,
        add_qkv_bias=given.add_qkv_bias,
        qk_layernorm=given.qk_layernorm,
        attention_output_gate=arguments.get("attention_output_gate", False),
        **_experts(arguments),
        **_others(arguments),
        **WITHOUT_KERNELS,
        tensor_model_parallel_size=ranks,
    )
    layers = _layers(config, given)
    return GPTModel(
        config,
        layers,
        vocab_size=given.padded_vocab_size,
        max_sequence_length=given.max_position_embeddings,
        position_embedding_type=given.position_embedding_type,
        rotary_base=given.rotary_base,
        rotary_percent=given.rotary_percent,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        mtp_block_spec=_depths(config, layers),
    )
