"""megatron-core's GPTModel on gloo ranks with weights of ours: the outside reference of losses and gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.schema.model import ModelSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megalaunch[parity])")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

Tensors = Mapping[str, Tensor]


def _without_cuda() -> None:
    """It asks for a CUDA device in two places that a run without dropout does not need."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


def loss_and_gradients(
    spec: ModelSpec, weights: Tensors, tokens_BS: Tensor, rank: int, ranks: int
) -> tuple[float, dict[str, Tensor]]:
    """Mean token loss, and the gradients of this rank's part under its own names. Collective over the world.

    `tokens_BS` has one token more than is predicted; `weights` are whole, under our names.
    """
    _without_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = _model(spec, tokens_BS.shape[1] - 1, ranks)
    with torch.no_grad():
        for name, value in tensors_of(spec, weights, rank, ranks).items():
            model.get_parameter(name).copy_(value)
    inputs, labels = tokens_BS[:, :-1], tokens_BS[:, 1:]
    length = inputs.shape[1]
    hidden_keys = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    losses = model(inputs, torch.arange(length).expand_as(inputs), hidden_keys, labels=labels)
    loss = losses.mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# No dropout, and none of the fused kernels that only CUDA has.
WITHOUT_KERNELS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}


def _model(spec: ModelSpec, length: int, ranks: int) -> Any:
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_output_gate=spec.attention_output_gate,
        **WITHOUT_KERNELS,
        tensor_model_parallel_size=ranks,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=spec.vocab_size,
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=int(spec.rope.theta),
        share_embeddings_and_output_weights=False,
    )


def tensors_of(spec: ModelSpec, ours: Tensors, rank: int, ranks: int) -> dict[str, Tensor]:
    """Whole tensors of ours (weights or their gradients) as this rank's tensors of its model, under its names."""

    def rows(value: Tensor) -> Tensor:
        return value.chunk(ranks, dim=0)[rank]

    def columns(value: Tensor) -> Tensor:
        return value.chunk(ranks, dim=1)[rank]

    theirs = {
        "embedding.word_embeddings.weight": rows(ours["embedding.weight"]),
        "decoder.final_layernorm.weight": ours["norm.weight"],
        "output_layer.weight": rows(ours["head.weight"]),
    }
    for index in range(spec.num_layers):
        mine, its = f"layers.{index}.", f"decoder.layers.{index}."
        gate_up = torch.cat([rows(ours[mine + f"mlp.{part}_proj.weight"]) for part in ("gate", "up")])
        theirs |= {
            its + "input_layernorm.weight": ours[mine + "attention_norm.weight"],
            its + "self_attention.linear_qkv.weight": rows(_by_group(spec, ours, mine + "attention.")),
            its + "self_attention.linear_proj.weight": columns(ours[mine + "attention.o_proj.weight"]),
            its + "pre_mlp_layernorm.weight": ours[mine + "mlp_norm.weight"],
            its + "mlp.linear_fc1.weight": gate_up,
            its + "mlp.linear_fc2.weight": columns(ours[mine + "mlp.down_proj.weight"]),
        }
    return theirs


def _by_group(spec: ModelSpec, ours: Tensors, prefix: str) -> Tensor:
    """Queries, their output gates if there are any, key and value of each group one after the other."""
    groups = spec.num_query_groups or spec.num_attention_heads
    names = ("q", "gate", "k", "v") if spec.attention_output_gate else ("q", "k", "v")
    parts: Iterator[tuple[Tensor, ...]] = zip(
        *(ours[f"{prefix}{part}_proj.weight"].chunk(groups) for part in names), strict=True
    )
    return torch.cat([torch.cat(part) for part in parts])
