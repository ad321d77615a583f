"""Activations saved for backward by each operator of a layer: one row per operator, in bytes per token.

The rows describe the decoder of engine/model in plain torch. With 16-bit activations a Llama layer has 2 (4h + 2q + 2k
+ 3f) bytes (h hidden, q and k widths of queries and keys, f inner width): table 2 of Korthikanti et al. 2022 ("Reducing
Activation Recomputation") with fused attention and without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megalaunch.config.schema.model import ModelSpec
from megalaunch.config.schema.recompute import RecomputeModule
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.layer_dims import DtypesAndGroups, LayerDims, layer_dims
from megalaunch.plan.memory.profiles import MemoryProfile

Divided = Literal["sequence", "tp", "whole"]


@dataclass(frozen=True)
class OpRow:
    """One operator: `bytes` per token, what shards them, and the recomputed modules that do not save them."""

    name: str
    bytes: Callable[[LayerDims], float]
    divided: Divided = "tp"
    spared_by: tuple[RecomputeModule, ...] = ()


ATTENTION = (
    OpRow("input of the first norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    OpRow("statistics of the first norm, fp32", lambda w: 4, "sequence"),
    OpRow("normed, input of the projections", lambda w: w.i * w.h, "sequence", ("norm",)),
    OpRow("queries, rotated", lambda w: w.b * w.q),
    OpRow("keys, rotated", lambda w: w.b * w.k * w.held),
    OpRow("values", lambda w: w.b * w.v * w.held),
    OpRow("mask of scores in the format of queries", lambda w: w.b * w.mask, "whole", ("attention",)),
    OpRow("queries and keys before their norms", lambda w: w.b * (w.q + w.k) if w.qk_norm else 0),
    OpRow(
        "attention's weights, where no fused kernel runs",
        lambda w: w.b * w.n * w.keys * w.unfused,
        "tp",
        ("attention",),
    ),
    OpRow("attention's weights that a processor keeps, fp32", lambda w: 4 * w.n * w.weights, "tp", ("attention",)),
    OpRow("log-sum of each softmax, fp32", lambda w: 4 * w.n, "tp", ("attention",)),
    OpRow("attention's output, input of the last projection", lambda w: w.i * w.o),
    OpRow("the same in 16 bits, beside an 8-bit input", lambda w: (w.b - w.i) * 2 * w.o, spared_by=("attention",)),
    OpRow("the same before the norm after it", lambda w: w.b * w.h if w.out_norm else 0, "sequence"),
    OpRow("dropout's mask, or what it is drawn from", lambda w: w.dropped, "sequence"),
)
# DeepSeek-V2 report, section 2.1: down to the latents (replicated on every rank), their norms, up to heads.
LATENTS = (
    OpRow("latent of queries", lambda w: w.b * w.ql, "sequence", ("mla_up",)),
    OpRow("latent of queries, normed", lambda w: w.i * w.ql, "sequence", ("norm",)),
    OpRow("latent of keys and values, and the rotary key", lambda w: w.b * (w.kl + w.p), "sequence"),
    OpRow("latent of keys and values, normed", lambda w: w.i * w.kl, "sequence", ("norm",)),
)
DENSE = (
    OpRow("input of the second norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    OpRow("statistics of the second norm, fp32", lambda w: 4, "sequence"),
    OpRow("normed, input of (gate and) up", lambda w: w.i * w.h, "sequence", ("norm",)),
    OpRow("inputs of the activation", lambda w: w.b * w.g * w.f, "tp", ("mlp",)),
    OpRow("activation's output, input of down", lambda w: w.i * w.f, "tp", ("mlp", "activation")),
    OpRow("the block's output before the norm after it", lambda w: w.b * w.h if w.out_norm else 0, "sequence"),
    OpRow("dropout's mask, or what it is drawn from", lambda w: w.dropped, "sequence"),
)
# Each token is dispatched to t experts; balanced routing is assumed. Expert matmuls have full rows.
EXPERTS = (
    OpRow("input of the second norm: the residual stream", lambda w: w.r * w.h, "sequence"),
    OpRow("statistics of the second norm, fp32", lambda w: 4, "sequence"),
    OpRow("normed, input of router and dispatch", lambda w: w.b * w.h, "sequence", ("norm",)),
    OpRow("router's logits and weights, fp32", lambda w: 2 * 4 * w.E, "sequence", ("moe",)),
    OpRow("dispatched copies, input of (gate and) up", lambda w: w.i * w.t * w.h, "sequence", ("moe",)),
    OpRow("inputs of the experts' activation", lambda w: w.b * w.g * w.t * w.e, "sequence", ("moe",)),
    OpRow("output of the experts' activation", lambda w: w.i * w.t * w.e, "sequence", ("moe", "activation")),
    OpRow("experts' outputs, weighted and summed", lambda w: w.b * w.t * w.h, "sequence", ("moe",)),
    OpRow("inputs of the shared experts' activation", lambda w: w.b * w.g * w.s, "tp", ("moe", "shared_experts")),
    OpRow("output of the shared experts' activation", lambda w: w.i * w.s, "tp", ("moe", "shared_experts")),
)
# DeepSeek-V3 report, section 2.2: two norms, concatenation of both streams, one projection; then the last norm.
FURTHER = (
    OpRow("inputs of the two norms", lambda w: 2 * w.r * w.h, "sequence"),
    OpRow("both normed, input of the projection", lambda w: w.i * 2 * w.h, "sequence", ("norm",)),
    OpRow("input of the last norm, and its output", lambda w: w.r * w.h + w.i * w.h, "sequence"),
)
ENDS = (OpRow("input of the last norm, and its output: the head's input", lambda w: w.r * w.h + w.i * w.h, "sequence"),)


def op_rows(widths: LayerDims) -> Iterator[OpRow]:
    """Yield the rows of one layer."""
    yield from ATTENTION
    if widths.mla:
        yield from LATENTS
    yield from EXPERTS if widths.experts else DENSE
    if widths.mtp:
        yield from FURTHER


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token of one layer: `kept` until backward, and `again` alive only while the layer is recomputed.

    `boundary` is its input, `working` the peak of gradients (and scores) in its backward, in addition.
    """

    kept: float
    again: float
    boundary: float
    working: float


def rows_with_bytes(
    model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, accounting: MemoryProfile
) -> Iterator[tuple[OpRow, float, bool]]:
    """Yield every row of one layer with saved bytes, its bytes per token, and whether recomputation saves them."""
    widths = layer_dims(model, kind, dtypes, accounting)
    for row in op_rows(widths):
        size = row.bytes(widths) / _divisor(row, dtypes, accounting)
        if size:
            yield row, size, any(module in row.spared_by for module in dtypes.modules)


@lru_cache(maxsize=8192)
def saved_bytes(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, accounting: MemoryProfile) -> SavedBytes:
    """Return the saved bytes of one layer, by the table."""
    kept = 0.0
    again = {True: 0.0, False: 0.0}  # attention, feed-forward block: one finishes before the other starts
    widths = layer_dims(model, kind, dtypes, accounting)
    for row, size, spared in rows_with_bytes(model, kind, dtypes, accounting):
        again[row in ATTENTION or row in LATENTS] += size if spared else 0.0
        kept += 0.0 if spared else size
    return SavedBytes(kept, max(again.values()), widths.r * widths.h / widths.part, _working(widths))


def _working(w: LayerDims) -> float:
    """Return the peak of gradients during the backward of one layer, in addition to its saved activations.

    The peak is in the feed-forward block: gradients of the residual stream, of the block's output and of the inputs of
    its activation; the inner values themselves are freed by then. A ring of context-parallel ranks works on scores
    after the block's values are freed.
    """
    if w.experts:
        inner = w.t * (w.h + w.d * w.e) / w.part + w.d * w.s
        kept = w.t * (2 * w.h + (w.g + 1) * w.e) / w.part + (w.g + 1) * w.s
    else:
        inner, kept = w.d * w.f, (w.g + 1) * w.f
    stream = w.h / w.part + w.h
    return max(w.b * (stream + inner), w.scores - w.b * (w.h / w.part + kept))


def _divisor(row: OpRow, dtypes: DtypesAndGroups, accounting: MemoryProfile) -> int:
    """Return the ranks that shard a row by sequence; widths of rows sharded over tp are local already."""
    if row.divided != "sequence" or not dtypes.sequence_parallel:
        return 1
    gathered = row.name.startswith("normed, input of") and not accounting.gathers_again
    return 1 if gathered else dtypes.tp


@lru_cache(maxsize=1024)
def head_bytes(model: ModelSpec, dtypes: DtypesAndGroups, accounting: MemoryProfile) -> float:
    """Return the bytes per token that the last norm and the head save."""
    widths = layer_dims(model, Layer(0, experts=False, window=None, mtp=False), dtypes, accounting)
    return sum(row.bytes(widths) / _divisor(row, dtypes, accounting) for row in ENDS)
