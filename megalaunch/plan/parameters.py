"""Count a model's parameters from its dimensions, by layer and by kind.

Counted is what an optimizer trains, with biases, sinks and the router's bias. Not counted are rotary tables, and the
balance bias of auxiliary-loss-free routing, which has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from megalaunch.plan.layers import Layer, list_layers
from megalaunch.schema.model import GATED, ModelSpec


@dataclass(frozen=True)
class LayerParameters:
    """Global parameter counts of one layer by kind; the kind decides how they are sharded.

    `attention`, `dense_mlp` and `shared_experts` are sharded over tp (keys and values over at most as many ranks as
    there are query groups), `routed_experts` over ep x etp. `latent` (the down projections of latent attention),
    `router` (with the gate of shared experts), `norms` and `mtp_projection` are replicated on every tensor-parallel
    rank.
    """

    attention: int = 0
    latent: int = 0
    dense_mlp: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    mtp_projection: int = 0

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by kind. `mtp` are those of MTP depths, all other kinds those of the decoder.

    `embedding` is the table of tokens, `positions` that of learned positions, `feed_forward` the dense blocks and
    shared experts, `idle_experts` the part of `routed_experts` that a token is not routed to; `head` is 0 when tied.
    """

    embedding: int
    positions: int
    attention: int
    feed_forward: int
    routed_experts: int
    idle_experts: int
    router: int
    norms: int
    head: int
    mtp: int

    @property
    def decoder(self) -> int:
        """All parameters but those of MTP depths: the published size of a model."""
        blocks = self.attention + self.feed_forward + self.routed_experts + self.router + self.norms
        return self.embedding + self.positions + blocks + self.head

    @property
    def total(self) -> int:
        """All trained parameters."""
        return self.decoder + self.mtp

    @property
    def active(self) -> int:
        """Active parameters of the decoder for one token: without idle experts, with the full embedding table.

        Mistral counts like this; DeepSeek and OpenAI exclude the input embedding: `active - embedding`.
        """
        return self.decoder - self.idle_experts


def check_resolved(model: ModelSpec) -> tuple[int, int, int]:
    """Return head_dim, num_query_groups and vocab_size; raises ValueError while one is open."""
    if model.head_dim is None or model.num_query_groups is None or model.vocab_size is None:
        raise ValueError("the model is not resolved: head_dim, num_query_groups or vocab_size is open")
    return model.head_dim, model.num_query_groups, model.vocab_size


_GRAIN = 128  # Megatron-LM's --make-vocab-size-divisible-by


def vocabulary_rows(vocab_size: int, tp: int) -> int:
    """Return the rows of embedding and head over `tp` tensor-parallel ranks: vocab_size if tp divides it.

    Else vocab_size is padded to a multiple of 128 x tp, as in Megatron-LM: all shards are equal, and of an efficient
    size for matmuls. Padded rows are zeros, excluded from loss, gradient and checkpoint.
    """
    return vocab_size if vocab_size % tp == 0 else -(-vocab_size // (_GRAIN * tp)) * _GRAIN * tp


@lru_cache(maxsize=64)
def count_parameters(model: ModelSpec) -> ParameterCount:
    """Return the exact parameter count of a model; raises ValueError while a dimension is open."""
    _, _, vocab = check_resolved(model)
    table = vocab * model.hidden_size
    layers = list_layers(model)
    counts = [layer_parameters(model, layer) for layer in layers]
    decoder = [count for layer, count in zip(layers, counts, strict=True) if not layer.mtp]
    routed = sum(count.routed_experts for count in decoder)
    experts = model.moe.num_experts or 1
    return ParameterCount(
        embedding=table,
        positions=position_parameters(model),
        attention=sum(count.attention + count.latent for count in decoder),
        feed_forward=sum(count.dense_mlp + count.shared_experts for count in decoder),
        routed_experts=routed,
        idle_experts=routed // experts * max(0, experts - model.moe.top_k),
        router=sum(count.router for count in decoder),
        norms=sum(count.norms for count in decoder) + norm_parameters(model, model.hidden_size),
        head=0 if model.tie_word_embeddings else table,
        mtp=sum(count.total for count in counts) - sum(count.total for count in decoder),
    )


@lru_cache(maxsize=1024)
def layer_parameters(model: ModelSpec, layer: Layer) -> LayerParameters:
    """Return the global parameter counts of one layer; raises ValueError while a dimension is open."""
    attention, latent, inner_norms = _attention(model)
    moe, hidden = model.moe, model.hidden_size
    dense = routed = shared = router = projection = 0
    if layer.experts and moe.num_experts is not None:
        routed = moe.num_experts * mlp_parameters(model, moe.ffn_hidden_size or model.ffn_hidden_size)
        shared = mlp_parameters(model, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else 0
        router = moe.num_experts * (hidden + model.moe.router_bias) + model.moe.shared_expert_gate * hidden
    else:
        dense = mlp_parameters(model, model.ffn_hidden_size)
    norms = 4 if model.norm_placement == "both" else 2
    if layer.mtp:  # norms of the stream, the next embedding and the head's input; a projection of both to one width
        projection = 2 * hidden * hidden
        norms += 3
    return LayerParameters(
        attention=attention,
        latent=latent,
        dense_mlp=dense,
        routed_experts=routed,
        shared_experts=shared,
        router=router,
        norms=norms * norm_parameters(model, hidden) + inner_norms,
        mtp_projection=projection,
    )


def position_parameters(model: ModelSpec) -> int:
    """Return the size of the table of learned positions."""
    return model.max_position_embeddings * model.hidden_size if model.position_embedding == "learned" else 0


def norm_parameters(model: ModelSpec, width: int) -> int:
    """Return the size of a norm's weight, and of its bias for a LayerNorm."""
    return width * (2 if model.norm == "layernorm" else 1)


def mlp_parameters(model: ModelSpec, width: int) -> int:
    """Return the size of one feed-forward block of inner width `width`: (gate,) up and down, with their biases."""
    inner = width * (2 if model.activation in GATED else 1)
    biases = inner + model.hidden_size if model.mlp_bias else 0
    return model.hidden_size * (inner + width) + biases


def _attention(model: ModelSpec) -> tuple[int, int, int]:
    """Return (projections sharded by head, replicated projections, norms within attention)."""
    head_dim, groups, _ = check_resolved(model)
    heads, hidden, mla = model.num_attention_heads, model.hidden_size, model.mla
    sinks = heads if model.attention_sinks else 0
    if mla.kv_lora_rank is not None:
        return _latent_attention(model, mla.kv_lora_rank, sinks)
    queries, keys = heads * head_dim, groups * head_dim
    entries = queries * (2 if model.attention_output_gate else 1) + 2 * keys
    weights = hidden * entries + queries * hidden
    biases = (entries if model.qkv_bias else 0) + (hidden if model.attention_output_bias else 0)
    norms = {
        "none": 0,
        "head": 2 * norm_parameters(model, head_dim),
        "full": norm_parameters(model, queries) + norm_parameters(model, keys),
    }[model.qk_norm]
    return weights + biases + sinks, 0, norms


def _latent_attention(model: ModelSpec, kv_rank: int, sinks: int) -> tuple[int, int, int]:
    """Count latent attention (MLA): DeepSeek-V2 report, section 2.1.

    Keys and values are projected up from one latent, with a separate rotary key; queries optionally from a latent too.
    """
    heads, hidden, mla = model.num_attention_heads, model.hidden_size, model.mla
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    up = kv_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    out = heads * mla.v_head_dim * hidden + (hidden if model.attention_output_bias else 0)
    down = hidden * (kv_rank + mla.qk_rope_head_dim)
    norms = norm_parameters(model, kv_rank)
    if mla.q_lora_rank is None:
        return hidden * query + up + out + sinks, down, norms
    norms += norm_parameters(model, mla.q_lora_rank)
    return mla.q_lora_rank * query + up + out + sinks, down + hidden * mla.q_lora_rank, norms
