"""What each operator of a layer keeps for the backward pass: one row an operator, bytes for each token.

The rows describe the decoder of engine/model in plain torch. With 16-bit activations a Llama layer comes to
2 (4h + 2q + 2k + 3f) bytes (h hidden, q and k widths of queries and keys, f inner width): what is left of
Korthikanti et al. 2022 ("Reducing Activation Recomputation"), table 2, when attention is fused and nothing drops out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.model import GATED, ModelSpec
from megalaunch.config.schema.recompute import RecomputeModule
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.accounting import Accounting

Divided = Literal["sequence", "tp", "whole"]


@dataclass(frozen=True)
class Widths:
    """Sizes of one layer on one tensor-parallel rank, and bytes of its formats.

    `b` bytes of an activation, `i` of a matmul's kept input, `r` of the residual stream. `h` hidden; `q`, `k`, `v`,
    `o` widths of queries, keys, values and attention's output, on one rank; `n` heads on one rank; `f` inner width
    on one rank, `e` of an expert, `s` of the shared experts; `g` what the activation keeps of these widths (1 plain,
    2 gate and up); `t` experts a token meets; `E` experts; `ql`, `kl`, `p` latents of queries and keys and the
    rotary part; `keys` attended tokens.
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
    t: float
    E: int
    ql: int
    kl: int
    p: int
    keys: int
    qk_norm: bool
    out_norm: bool
    dropout: bool
    mla: bool
    experts: bool
    mtp: bool
    unfused: bool


@dataclass(frozen=True)
class Row:
    """One operator: `bytes` a token, over what it is divided, and the recomputation that spares it."""

    name: str
    bytes: Callable[[Widths], float]
    divided: Divided = "tp"
    spared_by: tuple[RecomputeModule, ...] = ()


ATTENTION = (
    Row("input of the first norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    Row("statistics of the first norm, fp32", lambda w: 4, "sequence"),
    Row("normed, input of the projections", lambda w: w.i * w.h, "sequence", ("norm",)),
    Row("queries, rotated", lambda w: w.b * w.q),
    Row("keys, rotated", lambda w: w.b * w.k),
    Row("values", lambda w: w.b * w.v),
    Row("queries and keys before their norms", lambda w: w.b * (w.q + w.k) if w.qk_norm else 0),
    Row(
        "attention's weights, where no fused kernel runs",
        lambda w: w.b * w.n * w.keys * w.unfused,
        "tp",
        ("attention",),
    ),
    Row("log-sum of each softmax, fp32", lambda w: 4 * w.n, "tp", ("attention",)),
    Row("attention's output, input of the last projection", lambda w: w.i * w.o),
    Row("the same in 16 bits, beside an 8-bit input", lambda w: (w.b - w.i) * 2 * w.o, spared_by=("attention",)),
    Row("the same before the norm after it", lambda w: w.b * w.h if w.out_norm else 0, "sequence"),
    Row("dropout's mask", lambda w: w.h if w.dropout else 0, "sequence"),
)
# DeepSeek-V2 report, section 2.1: down to the latents (whole on every rank), their norms, up to heads.
LATENTS = (
    Row("latent of queries", lambda w: w.b * w.ql, "sequence", ("mla_up",)),
    Row("latent of queries, normed", lambda w: w.i * w.ql, "sequence", ("norm",)),
    Row("latent of keys and values, and the rotary key", lambda w: w.b * (w.kl + w.p), "sequence"),
    Row("latent of keys and values, normed", lambda w: w.i * w.kl, "sequence", ("norm",)),
)
DENSE = (
    Row("input of the second norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    Row("statistics of the second norm, fp32", lambda w: 4, "sequence"),
    Row("normed, input of (gate and) up", lambda w: w.i * w.h, "sequence", ("norm",)),
    Row("inputs of the activation", lambda w: w.b * w.g * w.f, "tp", ("mlp",)),
    Row("activation's output, input of down", lambda w: w.i * w.f, "tp", ("mlp", "activation")),
    Row("the block's output before the norm after it", lambda w: w.b * w.h if w.out_norm else 0, "sequence"),
    Row("dropout's mask", lambda w: w.h if w.dropout else 0, "sequence"),
)
# Tokens come to experts in copies, t of them; an even load is assumed. Their matmuls see full rows.
EXPERTS = (
    Row("input of the second norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    Row("statistics of the second norm, fp32", lambda w: 4, "sequence"),
    Row("normed, input of router and dispatch", lambda w: w.b * w.h, "sequence", ("norm",)),
    Row("router's logits and weights, fp32", lambda w: 2 * 4 * w.E, "sequence", ("moe",)),
    Row("dispatched copies, input of (gate and) up", lambda w: w.i * w.t * w.h, "sequence", ("moe",)),
    Row("inputs of the experts' activation", lambda w: w.b * w.g * w.t * w.e, "sequence", ("moe",)),
    Row("output of the experts' activation", lambda w: w.i * w.t * w.e, "sequence", ("moe", "activation")),
    Row("experts' outputs, weighted and summed", lambda w: w.b * w.t * w.h, "sequence", ("moe",)),
    Row("inputs of the shared experts' activation", lambda w: w.b * w.g * w.s, "tp", ("moe", "shared_experts")),
    Row("output of the shared experts' activation", lambda w: w.i * w.s, "tp", ("moe", "shared_experts")),
)
# DeepSeek-V3 report, section 2.2: two norms, both streams side by side, one projection; then the last norm.
FURTHER = (
    Row("inputs of the two norms", lambda w: 2 * w.r * w.h, "sequence"),
    Row("both normed, input of the projection", lambda w: w.i * 2 * w.h, "sequence", ("norm",)),
    Row("input of the last norm, and its output", lambda w: w.r * w.h + w.i * w.h, "sequence"),
)
ENDS = (Row("input of the last norm, and its output: the head's input", lambda w: w.r * w.h + w.i * w.h, "sequence"),)


def rows_of(widths: Widths) -> Iterator[Row]:
    """The rows of one layer."""
    yield from ATTENTION
    if widths.mla:
        yield from LATENTS
    yield from EXPERTS if widths.experts else DENSE
    if widths.mtp:
        yield from FURTHER


@dataclass(frozen=True)
class SavedBytes:
    """Bytes a token of one layer: kept until the backward pass, and alive only while the layer is computed again."""

    kept: float
    again: float
    boundary: float


@dataclass(frozen=True)
class Formats:
    """Bytes by format, and who shares what: all of a layer's memory that does not follow from the model."""

    tp: int
    etp: int
    ep: int
    sequence_parallel: bool
    compute: str
    residual: str
    modules: tuple[RecomputeModule, ...]
    keys: int

    @classmethod
    def of(cls, spec: RunSpec) -> Formats:
        """Those of a resolved spec."""
        p, recompute = spec.parallel, spec.recompute
        modules = recompute.modules if recompute.granularity == "selective" else ()
        keys = spec.batch.sequence_length
        return cls(
            p.tp, p.etp or 1, p.ep, p.sequence_parallel, spec.precision.compute, spec.precision.residual, modules, keys
        )


def rows_with_bytes(
    model: ModelSpec, kind: Layer, formats: Formats, accounting: Accounting
) -> Iterator[tuple[Row, float, bool]]:
    """Every row of one layer that keeps something, its bytes a token, and whether recomputation spares it."""
    widths = widths_of(model, kind, formats, accounting)
    for row in rows_of(widths):
        size = row.bytes(widths) / _divisor(row, formats, accounting)
        if size:
            yield row, size, any(module in row.spared_by for module in formats.modules)


@lru_cache(maxsize=8192)
def saved_bytes(model: ModelSpec, kind: Layer, formats: Formats, accounting: Accounting) -> SavedBytes:
    """What one layer keeps, by the table."""
    kept = again = 0.0
    widths = widths_of(model, kind, formats, accounting)
    for _, size, spared in rows_with_bytes(model, kind, formats, accounting):
        again += size if spared else 0.0
        kept += 0.0 if spared else size
    boundary = widths.r * widths.h / (formats.tp if formats.sequence_parallel else 1)
    return SavedBytes(kept, again, boundary)


def _divisor(row: Row, formats: Formats, accounting: Accounting) -> int:
    """Rows divided by tp have their widths divided already."""
    if row.divided != "sequence" or not formats.sequence_parallel:
        return 1
    gathered = row.name.startswith("normed, input of") and not accounting.gathers_again
    return 1 if gathered else formats.tp


def format_bytes(compute: str) -> int:
    """Bytes of an activation; fp8 computes on 16-bit ones."""
    return 4 if compute == "fp32" else 2


def widths_of(model: ModelSpec, kind: Layer, formats: Formats, accounting: Accounting) -> Widths:
    """The sizes of one layer on one rank."""
    tp, mla, moe = formats.tp, model.mla, model.moe
    b = format_bytes(formats.compute)
    small = formats.compute == "fp8" and accounting.float8_inputs
    heads, head_dim = model.num_attention_heads, model.head_dim or 0
    n = heads / tp
    groups = max(1.0, (model.num_query_groups or heads) / tp)
    latent = mla.kv_lora_rank is not None
    query = n * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) if latent else n * head_dim
    value = n * mla.v_head_dim if latent else groups * head_dim
    gated = model.activation in GATED
    return Widths(
        b=b,
        i=1 if small else b,
        r=4 if formats.residual == "fp32" else b,
        h=model.hidden_size,
        q=query,
        k=query if latent else groups * head_dim,
        v=value,
        o=n * mla.v_head_dim if latent else n * head_dim,
        n=n,
        f=model.ffn_hidden_size / tp,
        e=(moe.ffn_hidden_size or model.ffn_hidden_size) / formats.etp,
        s=moe.shared_ffn_hidden_size / tp,
        g=accounting.activation_inputs if gated else 1,
        t=moe.top_k * formats.etp,
        E=moe.num_experts or 0,
        ql=mla.q_lora_rank or 0,
        kl=mla.kv_lora_rank or 0,
        p=mla.qk_rope_head_dim,
        keys=min(formats.keys, kind.window or formats.keys),
        qk_norm=model.qk_norm != "none",
        out_norm=model.block_norms != "pre",
        dropout=model.hidden_dropout > 0,
        mla=latent,
        experts=kind.experts,
        mtp=kind.mtp,
        unfused=accounting.unfused_attention,
    )


@lru_cache(maxsize=1024)
def ends_bytes(model: ModelSpec, formats: Formats, accounting: Accounting) -> float:
    """Bytes a token that the last norm and the head keep."""
    widths = widths_of(model, Layer(0, experts=False, window=None, mtp=False), formats, accounting)
    return sum(row.bytes(widths) / _divisor(row, formats, accounting) for row in ENDS)
