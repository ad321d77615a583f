"""The matrices of a layer that map hidden states: those that Muon orthogonalizes (engine/optimizer/muon.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megalaunch.plan.layers import Layer
from megalaunch.plan.parameters import check_resolved
from megalaunch.schema.model import GATED, ModelSpec


@dataclass(frozen=True)
class HiddenMatrix:
    """`count` matrices [rows, columns] of one layer, and which ranks of a stage share each of them.

    `sharding`: over tp; over tp, but at most one rank for each query group (keys, values); the ranks of tp have copies;
    or routed experts, which are over ep and etp.
    """

    rows: int
    columns: int
    sharding: Literal["tp", "groups", "replicated", "experts"]
    count: int = 1


def hidden_matrices(model: ModelSpec, kind: Layer) -> Iterator[HiddenMatrix]:
    """Yield the matrices of a layer: each projection is one of its own, and so is each expert's."""
    hidden, moe = model.hidden_size, model.moe
    yield from _latent_attention(model) if model.mla.kv_lora_rank is not None else _attention(model)
    if kind.experts and moe.num_experts is not None:
        yield from _feed_forward(model, moe.ffn_hidden_size or model.ffn_hidden_size, moe.num_experts)
        if moe.shared_ffn_hidden_size:
            yield from _feed_forward(model, moe.shared_ffn_hidden_size)
    else:
        yield from _feed_forward(model, model.ffn_hidden_size)
    if kind.mtp:
        yield HiddenMatrix(hidden, 2 * hidden, "replicated")


def _attention(model: ModelSpec) -> Iterator[HiddenMatrix]:
    head_dim, groups, _ = check_resolved(model)
    hidden, queries = model.hidden_size, model.num_attention_heads * head_dim
    yield HiddenMatrix(queries, hidden, "tp", 2 if model.attention_output_gate else 1)
    yield HiddenMatrix(groups * head_dim, hidden, "groups", 2)
    yield HiddenMatrix(hidden, queries, "tp")


def _latent_attention(model: ModelSpec) -> Iterator[HiddenMatrix]:
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
    rank, query = mla.kv_lora_rank or 0, heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is not None:
        yield HiddenMatrix(mla.q_lora_rank, hidden, "replicated")
    yield HiddenMatrix(query, mla.q_lora_rank or hidden, "tp")
    yield HiddenMatrix(rank + mla.qk_rope_head_dim, hidden, "replicated")
    yield HiddenMatrix(heads * (mla.qk_nope_head_dim + mla.v_head_dim), rank, "tp")
    yield HiddenMatrix(hidden, heads * mla.v_head_dim, "tp")


def _feed_forward(model: ModelSpec, width: int, experts: int | None = None) -> Iterator[HiddenMatrix]:
    sharding: Literal["tp", "experts"] = "tp" if experts is None else "experts"
    yield HiddenMatrix(width, model.hidden_size, sharding, (2 if model.activation in GATED else 1) * (experts or 1))
    yield HiddenMatrix(model.hidden_size, width, sharding, experts or 1)
