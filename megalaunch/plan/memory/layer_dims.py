"""Dimensions of one layer on one rank: the units in which plan/memory/saved_activations.py counts."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.model import GATED, ModelSpec
from megalaunch.config.schema.parallel import ContextCommType
from megalaunch.config.schema.recompute import RecomputeModule
from megalaunch.plan.cp_comm_type import most_common_cp_comm_type
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.profiles import MemoryProfile


@dataclass(frozen=True)
class LayerDims:
    """Dimensions of one layer on one tensor-parallel rank, and bytes of its dtypes.

    Attributes:
        b, i, r: bytes of an activation, of a matmul's saved input, of the residual stream.
        h: hidden size.
        q, k, v, o: local widths of queries, keys, values and attention's output.
        n: local heads.
        f, e, s: local inner widths of the feed-forward block, of an expert, of the shared experts.
        g: inner values that the activation saves (1 plain, 2 gate and up).
        d: gradients of inner values alive at once in its backward.
        t: experts per token.
        E: experts.
        ql, kl, p: widths of the latents of queries and keys, and of the rotary part.
        keys: attended tokens.
        dropped: bytes that dropout saves for a block's output.
        held: context parallelism: ranks whose keys and values are saved.
        mask: columns of a saved attention mask.
        scores: bytes of the scores that a ring step or a block works on.
        weights: keys whose attention weights a CPU saves.
        part: ranks that shard the sequence.
    """

    b: float
    i: float
    r: float
    h: int
    q: float
    k: float
    v: float
    o: float
    n: float
    f: float
    e: float
    s: float
    g: int
    d: int
    t: float
    E: int
    ql: int
    kl: int
    p: int
    keys: int
    qk_norm: bool
    out_norm: bool
    dropped: int
    mla: bool
    experts: bool
    mtp: bool
    unfused: bool
    held: float
    mask: float
    scores: float
    weights: float
    part: int


@dataclass(frozen=True)
class DtypesAndGroups:
    """Dtypes and parallel degrees: what a layer's memory depends on besides the model."""

    tp: int
    etp: int
    ep: int
    sequence_parallel: bool
    compute: str
    residual: str
    modules: tuple[RecomputeModule, ...]
    keys: int
    cp: int
    exchange: ContextCommType
    documents: bool
    dynamic_cp: bool

    @classmethod
    def from_spec(cls, spec: RunSpec) -> DtypesAndGroups:
        """Return those of a resolved spec."""
        p, recompute = spec.parallel, spec.recompute
        modules = recompute.modules if recompute.granularity == "selective" else ()
        return cls(
            tp=p.tp,
            etp=p.etp or 1,
            ep=p.ep,
            sequence_parallel=p.sequence_parallel,
            compute=spec.precision.compute_dtype,
            residual=spec.precision.residual_dtype,
            modules=modules,
            keys=spec.batch.sequence_length,
            cp=p.cp,
            exchange=most_common_cp_comm_type(p),
            documents=spec.data.reset_attention_mask,
            dynamic_cp=p.dynamic_context_parallel and p.cp > 1,
        )


def dtype_bytes(compute: str) -> int:
    """Return the bytes of an activation; with fp8 activations have 16 bits."""
    return 4 if compute == "fp32" else 2


def layer_dims(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, accounting: MemoryProfile) -> LayerDims:
    """Return the dimensions of one layer on one rank."""
    tp, mla, moe = dtypes.tp, model.mla, model.moe
    b = dtype_bytes(dtypes.compute)
    small = dtypes.compute == "fp8" and accounting.float8_inputs
    heads, head_dim = model.num_attention_heads, model.head_dim or 0
    n = heads / tp
    groups = max(1.0, (model.num_query_groups or heads) / tp)
    latent = mla.kv_lora_rank is not None
    query = n * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) if latent else n * head_dim
    value = n * mla.v_head_dim if latent else groups * head_dim
    gated = model.activation in GATED
    return LayerDims(
        b=b,
        i=1 if small else b,
        r=4 if dtypes.residual == "fp32" else b,
        h=model.hidden_size,
        q=query,
        k=query if latent else groups * head_dim,
        v=value,
        o=n * mla.v_head_dim if latent else n * head_dim,
        n=n,
        f=model.ffn_hidden_size / tp,
        e=(moe.ffn_hidden_size or model.ffn_hidden_size) / dtypes.etp,
        s=moe.shared_ffn_hidden_size / tp,
        g=accounting.activation_inputs if gated else 1,
        d=accounting.activation_gradients if gated else 1,
        t=moe.top_k * dtypes.etp,
        E=moe.num_experts or 0,
        ql=mla.q_lora_rank or 0,
        kl=mla.kv_lora_rank or 0,
        p=mla.qk_rope_head_dim,
        keys=min(dtypes.keys, kind.window or dtypes.keys),
        qk_norm=model.qk_norm != "none",
        out_norm=model.norm_placement != "pre",
        dropped=(model.hidden_size if accounting.dropout_masks else 4) if model.hidden_dropout else 0,
        mla=latent,
        experts=kind.experts,
        mtp=kind.mtp,
        unfused=accounting.unfused_attention,
        held=_local_kv_heads(dtypes, groups),
        mask=_seen(dtypes) if accounting.plain_contexts and _mask_bytes(dtypes) and not _scored(model) else 0,
        scores=_score_bytes(model, dtypes, accounting, n, query),
        weights=_weighed(model, kind, dtypes, accounting, n / groups),
        part=tp if dtypes.sequence_parallel else 1,
    )


def _local_kv_heads(dtypes: DtypesAndGroups, groups: float) -> float:
    """Return the saved keys and values of a rank, relative to those of its own tokens.

    An all-gather saves those of all cp ranks; an all-to-all repeats heads if there are fewer groups than ranks.
    """
    if dtypes.dynamic_cp:
        return dtypes.cp + 0.5  # of both pieces of a document (_seen)
    if dtypes.exchange == "allgather":
        return dtypes.cp
    return max(1.0, dtypes.cp / groups) if dtypes.exchange == "a2a" else 1.0


def _seen(dtypes: DtypesAndGroups) -> float:
    """Return the keys per token of a mask.

    With dynamic cp a rank has two chunks of a document, each with the keys up to its end.
    """
    return dtypes.keys * (1 + 1 / (2 * dtypes.cp)) / 2 if dtypes.dynamic_cp else dtypes.keys


def _score_bytes(
    model: ModelSpec, dtypes: DtypesAndGroups, accounting: MemoryProfile, heads: float, query: float
) -> float:
    """Return the bytes of scores, in fp32, and of buffers as wide as the queries, where no fused kernel runs.

    The buffers are queries, keys and values of every head, the output's gradient, and the gradients of all four. A ring
    works on the keys of one rank at a time, other types on a block of queries. Logit softcapping saves a derivative,
    dropout one byte per score.
    """
    here = dtypes.keys / dtypes.cp
    if _in_ring(dtypes):
        scores = heads * here
    elif _scored(model) and accounting.scored_queries:
        whole = dtypes.keys if dtypes.exchange == "a2a" else here  # queries of one sample on this rank
        scores = heads * min(accounting.scored_queries / whole, 1.0) * dtypes.keys
    else:
        return 0.0
    more = (4 if model.attn_logit_softcapping else 0) + (1 if model.attention_dropout else 0)
    return accounting.ring_scores * 4 * (scores + 4 * query) + more * scores


def _weighed(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, accounting: MemoryProfile, heads: float) -> float:
    """Return the mean number of keys per token and head whose attention weights a CPU saves; `heads` per group.

    With dynamic cp this applies only to a rank's first piece of a document, half of the rank's tokens.
    """
    plain = dtypes.cp == 1 or dtypes.exchange == "a2a" or dtypes.dynamic_cp
    masked = dtypes.documents and not dtypes.dynamic_cp
    share, tokens = (0.5, dtypes.keys / (2 * dtypes.cp)) if dtypes.dynamic_cp else (1.0, dtypes.keys)
    seen_by_all = kind.window is None or kind.window >= tokens
    if dtypes.compute != "fp32" or _scored(model) or masked or not (plain and seen_by_all):
        return 0.0
    block = max(accounting.weight_rows // heads, 16)
    return share * (tokens + min(block, tokens)) / 2 if tokens <= accounting.kept_weights else 0.0


def _scored(model: ModelSpec) -> bool:
    """Return whether torch's attention does not support the model's (engine/model/attention/score_mod.py)."""
    return model.attn_logit_softcapping is not None or model.attention_sinks or model.attention_dropout > 0


def _in_ring(dtypes: DtypesAndGroups) -> bool:
    return dtypes.cp > 1 and dtypes.exchange == "p2p"


def _mask_bytes(dtypes: DtypesAndGroups) -> bool:
    """Return whether a mask is saved: not for purely causal attention, nor in a ring, which rebuilds it."""
    if dtypes.cp > 1 and dtypes.exchange == "allgather":
        return True
    return dtypes.documents and not _in_ring(dtypes)
