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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
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
MODELS: dict[str, dict[str, Any]] = {"llama": _LLAMA, "gpt": _GPT, "mixtral": _MIXTRAL, "deepseek": _DEEPSEEK}
# What a real run keeps beside: classes of its own among plain values.
_BESIDE = {"attention_backend": AttnBackend.auto, "params_dtype": torch.float32, "lr": 1e-4}
TOKENS = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(4))


def save(name: str, folder: Path, ranks: int = 1, stacked: bool = True, **changes: Any) -> torch.Tensor:
    """A checkpoint of random weights in `folder`; its logits of TOKENS."""
    folder.mkdir(parents=True)
    return run_ranks(ranks, _save, {**MODELS[name], **changes}, folder, stacked, timeout=120, any_object=True)[0]


def _save(arguments: dict[str, Any], folder: Path, stacked: bool) -> torch.Tensor:
    _without_cuda()
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._get_write_results_queue = lambda *_, **__: results
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = _model(arguments, ranks, stacked)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
        for tensor in (*model.parameters(), *biases):  # norms and biases, too, are something else than ones and zeros
            tensor.add_(torch.empty_like(tensor).uniform_(-0.3, 0.3))
        if ranks > 1:
            _agree(model)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model.eval()(TOKENS, torch.arange(LENGTH).expand_as(TOKENS), hidden)
    shared = {"args": Namespace(**arguments, **_BESIDE), "iteration": 7, "checkpoint_version": 3.0}
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
    dist_checkpointing.save({"model": state, **shared}, str(folder))
    return torch.cat(_from_all(logits.contiguous(), ranks), dim=-1)


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


def _layers(config: TransformerConfig, given: Namespace) -> Any:
    """The layers' modules: alike, or dense ones and others with experts."""
    kinds = {"qk_layernorm": given.qk_layernorm, "normalization": given.normalization}
    if config.num_moe_experts is None:
        return get_gpt_layer_local_spec(**kinds)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=given.normalization)


def _model(arguments: dict[str, Any], ranks: int, stacked: bool) -> Any:
    given = Namespace(**arguments)
    config = TransformerConfig(
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
        **_experts(arguments),
        **WITHOUT_KERNELS,
        tensor_model_parallel_size=ranks,
    )
    return GPTModel(
        config,
        _layers(config, given),
        vocab_size=given.padded_vocab_size,
        max_sequence_length=given.max_position_embeddings,
        position_embedding_type=given.position_embedding_type,
        rotary_base=given.rotary_base,
        rotary_percent=given.rotary_percent,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
    )
