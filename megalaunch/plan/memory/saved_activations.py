"""Activations saved for backward by each operator of a layer: one row per operator, in bytes per token.

The rows describe the decoder of engine/model in plain torch. With 16-bit activations a Llama layer has 2 (4h + 2q + 2k
+ 3f) bytes (h hidden, q and k dims of queries and keys, f inner width): table 2 of Korthikanti et al. 2022 ("Reducing
Activation Recomputation") with fused attention and without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.backward_peak import backward_peak
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.layer_dims import LayerDims, layer_dims
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.recompute import RecomputeModule

Sharding = Literal["sequence", "tp", "replicated"]


@dataclass(frozen=True)
class OpRow:
    """One operator: `bytes` per token, how they are sharded, and the recompute modules that do not save them.

    `gathered`: a matmul's input that sequence parallelism all-gathers; a profile may save it gathered.
    """

    name: str
    bytes: Callable[[LayerDims], float]
    sharding: Sharding = "tp"
    recomputed_by: tuple[RecomputeModule, ...] = ()
    gathered: bool = False


ATTENTION = (
    OpRow("input of the first norm: the residual stream", lambda d: d.residual_bytes * d.hidden_size, "sequence"),
    OpRow("statistics of the first norm, fp32", lambda d: 4, "sequence"),
    OpRow(
        "first norm's output, input of the projections",
        lambda d: d.matmul_input_bytes * d.input_copies.attention * d.hidden_size,
        "sequence",
        ("norm",),
        gathered=True,
    ),
    OpRow("queries, after RoPE", lambda d: d.activation_bytes * d.query_width, recomputed_by=("mla_up",)),
    OpRow(
        "keys, after RoPE", lambda d: d.activation_bytes * d.key_width * d.saved_kv_shards, recomputed_by=("mla_up",)
    ),
    OpRow("values", lambda d: d.activation_bytes * d.value_width * d.saved_kv_shards, recomputed_by=("mla_up",)),
    OpRow(
        "keys and values, repeated for every query head",
        lambda d: d.activation_bytes * (d.key_width + d.value_width) * d.repeated_kv_shards,
        recomputed_by=("attention",),
    ),
    OpRow(
        "attention mask in the dtype of queries",
        lambda d: d.activation_bytes * d.mask_keys,
        "replicated",
        ("attention",),
    ),
    OpRow(
        "queries and keys before RoPE, and output gate before its sigmoid, in one tensor with the values",
        lambda d: d.activation_bytes * d.kept_width,
    ),
    OpRow(
        "queries and keys, before QK norm",
        lambda d: d.activation_bytes * (d.query_width + d.key_width) if d.qk_norm_rows else 0,
    ),
    OpRow("statistics of QK norm, fp32", lambda d: 4 * d.qk_norm_rows),
    OpRow(
        "attention weights of unfused attention",
        lambda d: d.saved_score_bytes,
        "tp",
        ("attention",),
    ),
    OpRow(
        "attention weights of causal attention on CPU, fp32",
        lambda d: 4 * d.num_heads * d.saved_weight_keys,
        "tp",
        ("attention",),
    ),
    OpRow("logsumexp of each softmax, fp32", lambda d: 4 * d.num_heads, "tp", ("attention",)),
    OpRow(
        "attention's output before its sinks, and their factor in fp32",
        lambda d: d.activation_bytes * d.attention_output_width + 4 * d.num_heads if d.flex_call.sinks else 0,
        recomputed_by=("attention",),
    ),
    OpRow(
        "attention's output of kept weights, and of all in 16 values; their sums, share and hashes, 4 bytes each",
        lambda d: (
            d.flex_call.dropout
            * (d.activation_bytes * (d.attention_output_width + 16 * d.num_heads) + 17 * d.num_heads)
        ),
        recomputed_by=("attention",),
    ),
    OpRow(
        "attention's output before its gate",
        lambda d: d.activation_bytes * d.gate_width if d.matmul_input_bytes == d.activation_bytes else 0,
        recomputed_by=("attention",),
    ),
    OpRow("sigmoid of the output gate, or the gate", lambda d: d.activation_bytes * d.gate_width),
    OpRow(
        "attention's output, input of the output projection",
        lambda d: d.matmul_input_bytes * d.attention_output_width * d.attention_output_copies,
    ),
    OpRow(
        "attention's output in 16 bits, in addition to the fp8 input",
        lambda d: (d.activation_bytes - d.matmul_input_bytes) * 2 * d.attention_output_width,
        recomputed_by=("attention",),
    ),
    OpRow(
        "output projection's output, before its norm",
        lambda d: d.activation_bytes * d.hidden_size if d.post_norm else 0,
        "sequence",
    ),
    OpRow("dropout mask, or its random seed", lambda d: d.dropout_mask_bytes, "sequence"),
)
# DeepSeek-V2 report, section 2.1: down to the latents (replicated on every rank), their norms, up to heads.
LATENTS = (
    OpRow("query latent", lambda d: d.activation_bytes * d.q_lora_rank, "sequence"),
    OpRow("query latent after its norm", lambda d: d.matmul_input_bytes * d.q_lora_rank, "sequence", ("norm",)),
    OpRow(
        "key/value latent, and the RoPE key",
        lambda d: d.activation_bytes * (d.kv_lora_rank + d.qk_rope_head_dim),
        "sequence",
    ),
    OpRow("statistics of the latents' norms, fp32", lambda d: 4 * (1 + (d.q_lora_rank > 0)), "sequence"),
    OpRow("key/value latent after its norm", lambda d: d.matmul_input_bytes * d.kv_lora_rank, "sequence", ("norm",)),
)
DENSE = (
    OpRow("input of the second norm: the residual stream", lambda d: d.second_norm_input_bytes, "sequence"),
    OpRow("statistics of the second norm, fp32", lambda d: 4, "sequence"),
    OpRow(
        "second norm's output, input of (gate and) up",
        lambda d: d.matmul_input_bytes * d.input_copies.ffn * d.hidden_size,
        "sequence",
        ("norm",),
        gathered=True,
    ),
    OpRow(
        "inputs of the activation",
        lambda d: d.activation_bytes * d.saved_activation_inputs * d.ffn_width,
        "tp",
        ("mlp",),
    ),
    OpRow(
        "activation's output, input of down", lambda d: d.matmul_input_bytes * d.ffn_width, "tp", ("mlp", "activation")
    ),
    OpRow(
        "down projection's output, before its norm",
        lambda d: d.activation_bytes * d.hidden_size if d.post_norm else 0,
        "sequence",
    ),
    OpRow("dropout mask, or its random seed", lambda d: d.dropout_mask_bytes, "sequence"),
)
# Of the rank whose experts have most rows (plan/expert_rows.py). Expert matmuls have full rows.
EXPERTS = (
    OpRow("input of the second norm: the residual stream", lambda d: d.second_norm_input_bytes, "sequence"),
    OpRow("statistics of the second norm, fp32", lambda d: 4, "sequence"),
    OpRow(
        "second norm's output, input of router and shared experts",
        lambda d: 0 if d.router_copies_input and not d.shared_ffn_width else d.activation_bytes * d.hidden_size,
        "sequence",
        ("norm",),
        gathered=True,
    ),
    OpRow(
        "the same in 8 bits, of the shared experts",
        lambda d: d.matmul_input_bytes * d.input_copies.shared_experts * d.hidden_size,
        "sequence",
        ("moe", "shared_experts"),
        gathered=True,
    ),
    OpRow(
        "router's input after its jitter, in its dtype",
        lambda d: d.router_bytes * d.hidden_size if d.router_copies_input else 0,
        "sequence",
        ("moe",),
    ),
    OpRow(
        "router's scores, and logits where they are saved, too",
        lambda d: d.router_bytes * d.num_experts * d.router_matrices,
        "sequence",
        ("moe",),
    ),
    OpRow("weights of a token's experts", lambda d: d.router_bytes * (2 * d.top_k + 1), "sequence", ("moe",)),
    OpRow(
        "numbers of a token's experts and order of rows, int64",
        lambda d: 8 * (2 * d.top_k + d.expert_rows),
        "sequence",
        ("moe",),
    ),
    OpRow(
        "dispatched tokens, input of (gate and) up",
        lambda d: d.matmul_input_bytes * d.input_copies.experts * d.expert_rows * d.hidden_size,
        "sequence",
        ("moe",),
    ),
    OpRow(
        "inputs of the experts' activation",
        lambda d: d.activation_bytes * d.saved_activation_inputs * d.expert_rows * d.expert_ffn_width,
        "sequence",
        ("moe",),
    ),
    OpRow(
        "output of the experts' activation",
        lambda d: d.matmul_input_bytes * d.expert_rows * d.expert_ffn_width,
        "sequence",
        ("moe", "activation"),
    ),
    OpRow(
        "experts' outputs, to be weighted and summed",
        lambda d: d.activation_bytes * d.summed_rows * d.hidden_size,
        "sequence",
        ("moe",),
    ),
    OpRow(
        "inputs of the shared experts' activation",
        lambda d: d.activation_bytes * d.saved_activation_inputs * d.shared_ffn_width,
        "tp",
        ("moe", "shared_experts"),
    ),
    OpRow(
        "output of the shared experts' activation",
        lambda d: d.matmul_input_bytes * d.shared_ffn_width,
        "tp",
        ("moe", "shared_experts", "activation"),
    ),
    OpRow(
        "shared experts' output and its gate",
        lambda d: d.activation_bytes * (d.hidden_size + 1) if d.shared_expert_gate else 0,
        "sequence",
        ("moe", "shared_experts"),
    ),
)
# DeepSeek-V3 report, section 2.2: two norms, concatenation of both streams, one projection; then the final norm.
MTP = (
    OpRow("inputs of the two norms", lambda d: 2 * d.residual_bytes * d.hidden_size, "sequence"),
    OpRow(
        "outputs of the two norms, input of the projection",
        lambda d: d.matmul_input_bytes * 2 * d.hidden_size,
        "sequence",
        ("norm",),
    ),
    OpRow(
        "input and output of the final norm",
        lambda d: d.residual_bytes * d.hidden_size + d.matmul_input_bytes * d.hidden_size,
        "sequence",
    ),
)
HEAD = (
    OpRow(
        "input and output of the final norm: the head's input",
        lambda d: d.residual_bytes * d.hidden_size + d.matmul_input_bytes * d.hidden_size,
        "sequence",
    ),
)


def op_rows(dims: LayerDims) -> Iterator[OpRow]:
    """Yield the rows of one layer."""
    yield from ATTENTION
    if dims.mla:
        yield from LATENTS
    yield from EXPERTS if dims.experts else DENSE
    if dims.mtp:
        yield from MTP


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token of one layer.

    Attributes:
        saved: saved for backward.
        recomputed: allocated in addition while the layer is recomputed.
        recomputed_at_peak: of them, those at the peak of its backward.
        layer_input: of them, the layer's input.
        backward_peak: peak of gradients (and scores) in its backward, in addition.
        freed_at_peak: of the saved or recomputed, those that are freed at that peak, for as many bytes of gradients.
        weight_gradients: bytes of gradients of weights that exist at that peak, not per token.
        output_gradients: of its projections' outputs, which a backward pass for weights reads.
    """

    saved: float
    recomputed: float
    recomputed_at_peak: float
    layer_input: float
    backward_peak: float
    freed_at_peak: float
    weight_gradients: float
    output_gradients: float

    @property
    def without_recompute(self) -> float:
        """Bytes saved for backward if nothing is recomputed."""
        return self.saved + self.recomputed


def rows_with_bytes(
    model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile
) -> Iterator[tuple[OpRow, float, bool]]:
    """Yield every row of one layer with saved bytes, its bytes per token, and whether it is recomputed instead."""
    dims = layer_dims(model, kind, dtypes, profile)
    for row in op_rows(dims):
        size = row.bytes(dims) / _sequence_shards(row, dtypes, profile)
        if size:
            yield row, size, any(module in row.recomputed_by for module in dtypes.recompute_modules)


@lru_cache(maxsize=8192)
def saved_bytes(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile) -> SavedBytes:
    """Return the saved bytes of one layer, by the table."""
    saved = 0.0
    recomputed = {True: 0.0, False: 0.0}  # attention, feed-forward block: one finishes before the other starts
    dims = layer_dims(model, kind, dtypes, profile)
    for row, size, is_recomputed in rows_with_bytes(model, kind, dtypes, profile):
        recomputed[row in ATTENTION or row in LATENTS] += size if is_recomputed else 0.0
        saved += 0.0 if is_recomputed else size
    layer_input = dims.residual_bytes * dims.hidden_size / dims.sequence_shards
    peak = backward_peak(dims, recomputed[True], recomputed[False])
    return SavedBytes(saved, max(recomputed.values()), peak[0], layer_input, *peak[1:], _output_gradients(dims))


def _output_gradients(d: LayerDims) -> float:
    """Return the bytes of the gradients of the outputs of a layer's projections and norms."""
    attention = d.query_width + d.key_width + d.value_width + d.gate_width
    if d.experts:
        routed = d.expert_rows * (d.input_projections * d.expert_ffn_width + d.hidden_size)
        block = routed / d.sequence_shards + d.input_projections * d.shared_ffn_width
    else:
        block = d.input_projections * d.ffn_width
    return d.activation_bytes * (attention + block + 4 * d.hidden_size / d.sequence_shards)


def _sequence_shards(row: OpRow, dtypes: DtypesAndGroups, profile: MemoryProfile) -> int:
    """Return the ranks that shard a row by sequence; widths of rows sharded over tp are local already."""
    if row.sharding != "sequence" or not dtypes.sequence_parallel:
        return 1
    return 1 if row.gathered and not profile.regathers_inputs else dtypes.tp


@lru_cache(maxsize=1024)
def head_bytes(model: ModelSpec, dtypes: DtypesAndGroups, profile: MemoryProfile) -> float:
    """Return the bytes per token that the last norm and the head save."""
    dims = layer_dims(model, Layer(0, experts=False, window=None, mtp=False), dtypes, profile)
    return sum(row.bytes(dims) / _sequence_shards(row, dtypes, profile) for row in HEAD)
