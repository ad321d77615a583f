"""Time of one layer for one microbatch on one device: matmuls, attention and memory-bound operators, both passes.

A roofline model by kind of operator: matmuls and attention at their efficiency, the rest at memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megalaunch.plan.cost import constants as c
from megalaunch.plan.cost.attention import (
    AttentionKernel,
    AttentionRates,
    AttentionShape,
    attention_seconds,
    head_widths,
)
from megalaunch.plan.cost.stacks import Stack
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.layers import Layer
from megalaunch.plan.parameters import vocabulary_rows
from megalaunch.schema.model import GATED, ModelSpec
from megalaunch.schema.recompute import RecomputeModule


@dataclass(frozen=True)
class Device:
    """A chip with the kernels of a stack.

    Attributes:
        stack: the kernels.
        attention_flops: peak FLOP/s of attention.
        matmul_flops, head_flops, fp32_flops: FLOP/s of matmuls in the compute dtype, of the head, and in fp32. In FP8
            the head's are also those of layers in bf16.
        weight_gradient_flops: FLOP/s of the matmuls of weight gradients.
        memory: bytes/s of memory-bound kernels.
        host: bytes/s of copies to host memory, and of copies from it.
        float8: matmuls of layers are in fp8.
        element: bytes of an activation.
    """

    stack: Stack
    attention_flops: float
    matmul_flops: float
    weight_gradient_flops: float
    head_flops: float
    fp32_flops: float
    memory: float
    host: float
    float8: bool
    element: int

    @property
    def attention_rates(self) -> AttentionRates:
        """The rates of attention kernels."""
        return AttentionRates(self.attention_flops, self.head_flops, self.fp32_flops, self.memory)


@dataclass(frozen=True)
class Shape:
    """One microbatch on one device: `tokens` of its shard of a sequence, and the degrees that shard the layer.

    `expert_rows`: rows at its experts, per token after sequence parallelism.
    """

    tokens: float
    sequence: int
    tp: int
    ep: int
    etp: int
    sequence_parallel: bool
    expert_rows: ExpertRows
    recomputed_modules: tuple[RecomputeModule, ...]
    full_recompute: bool


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one microbatch, both passes; `recompute` is forward work repeated in backward.

    Of them, `grouped` are the matmuls of routed experts, and `permutation` the permutation of their rows.
    """

    matmul: float
    attention: float
    memory: float
    recompute: float
    forward: float
    grouped: float
    permutation: float

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return self.matmul + self.attention + self.memory + self.recompute


@dataclass(frozen=True)
class Matmul:
    """[rows, k] x [k, n], `count` times; `repeated_by` are the recomputed modules that repeat it.

    `routed`: of routed experts.
    """

    rows: float
    k: float
    n: float
    repeated_by: tuple[RecomputeModule, ...] = ()
    count: float = 1.0
    routed: bool = False


def matmul_seconds(rows: float, k: float, n: float, flops: float) -> float:
    """Return the seconds of one matmul of a forward pass."""
    edge = 1 + c.MATMUL_EDGE.value * (1 / rows + 1 / k + 1 / n)
    return 2 * rows * k * n * edge / flops


@lru_cache(maxsize=8192)
def layer_time(model: ModelSpec, kind: Layer, shape: Shape, device: Device, kernel: AttentionKernel) -> LayerTime:
    """Return the seconds of one layer, whose attention is computed by `kernel`."""
    forward = again = grouped = 0.0
    flops = device.head_flops if kind.bf16 else device.matmul_flops
    for product in _matmuls(model, kind, shape):
        seconds = matmul_seconds(product.rows, product.k, product.n, flops) * product.count
        forward += seconds
        again += seconds if any(module in shape.recomputed_modules for module in product.repeated_by) else 0.0
        grouped += seconds if product.routed else 0.0
    groups = model.num_attention_heads if model.mla.kv_lora_rank else model.num_query_groups or 1
    at = AttentionShape(
        shape.tokens,
        shape.sequence,
        model.num_attention_heads / shape.tp,
        max(1.0, groups / shape.tp),
        device.element,
    )
    attention, attention_back = attention_seconds(model, kind, at, kernel, device.attention_rates)
    memory = _memory_bytes(model, kind, shape, device) / device.memory
    if shape.recomputed_modules and device.stack.selective_matmuls.value:
        again = forward * device.stack.selective_matmuls.value + memory / 3
    again += attention if "attention" in shape.recomputed_modules else 0.0
    if shape.full_recompute:
        again = forward + attention + memory / 3
    # Half of the matmuls of backward are those of weight gradients.
    slower = 1.0 if kind.bf16 else device.matmul_flops / device.weight_gradient_flops
    passes = 1 + c.BACKWARD.value / 2 * (1 + slower)
    return LayerTime(
        matmul=forward * passes,
        attention=attention + attention_back,
        memory=memory,
        recompute=again,
        forward=forward + attention + memory / 3,
        grouped=grouped * passes,
        permutation=_permutation_values(model, shape) * shape.tokens * device.element / device.memory
        if kind.experts
        else 0.0,
    )


def _matmuls(model: ModelSpec, kind: Layer, shape: Shape) -> Iterator[Matmul]:
    """Yield the matmuls of the forward pass of one layer on one device."""
    rows, hidden, tp = shape.tokens, model.hidden_size, shape.tp
    yield from _latent_projections(model, shape) if model.mla.kv_lora_rank else _projections(model, shape)
    gate = 2 if model.activation in GATED else 1
    if kind.mtp:
        yield Matmul(rows / (tp if shape.sequence_parallel else 1), 2 * hidden, hidden)
    if not kind.experts:
        yield Matmul(rows, hidden, gate * model.ffn_hidden_size / tp, ("mlp",))
        # No module: recomputation does not repeat this matmul, it stops when the input is recomputed.
        yield Matmul(rows, model.ffn_hidden_size / tp, hidden)
        return
    moe = model.moe
    experts, width = moe.num_experts or 1, (moe.ffn_hidden_size or model.ffn_hidden_size) / shape.etp
    local_experts = max(1.0, experts / shape.ep)
    own = rows / (tp if shape.sequence_parallel else 1)
    each = own * shape.expert_rows.arriving / local_experts
    yield Matmul(each, hidden, gate * width, ("moe",), local_experts, routed=True)
    yield Matmul(each, width, hidden, ("moe",), local_experts, routed=True)
    yield Matmul(own, hidden, experts, ("moe",))
    if moe.shared_ffn_hidden_size:
        shared: tuple[RecomputeModule, ...] = ("moe", "shared_experts")
        yield Matmul(rows, hidden, gate * moe.shared_ffn_hidden_size / tp, shared)
        yield Matmul(rows, moe.shared_ffn_hidden_size / tp, hidden, shared if moe.shared_expert_gate else ())


def _projections(model: ModelSpec, shape: Shape) -> Iterator[Matmul]:
    heads, groups, head_dim = model.num_attention_heads, model.num_query_groups or 1, model.head_dim or 0
    queries, keys = heads * head_dim / shape.tp, head_dim * max(groups / shape.tp, 1.0)
    gates = queries if model.attention_output_gate else 0
    yield Matmul(shape.tokens, model.hidden_size, queries + gates + 2 * keys)
    yield Matmul(shape.tokens, queries, model.hidden_size)


def _latent_projections(model: ModelSpec, shape: Shape) -> Iterator[Matmul]:
    """Yield the projections of MLA (DeepSeek-V2 report, section 2.1).

    The down projections are replicated on every rank and computed for its shard of the tokens.
    """
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads / shape.tp
    part = shape.tokens / (shape.tp if shape.sequence_parallel else 1)
    query, rank = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.kv_lora_rank or 1
    if mla.q_lora_rank:
        yield Matmul(part, hidden, mla.q_lora_rank)
        yield Matmul(shape.tokens, mla.q_lora_rank, query, ("mla_up",))
    else:
        yield Matmul(shape.tokens, hidden, query, ("mla_up",))
    yield Matmul(part, hidden, rank + mla.qk_rope_head_dim)
    yield Matmul(shape.tokens, rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), ("mla_up",))
    yield Matmul(shape.tokens, heads * mla.v_head_dim, hidden)


def _memory_bytes(model: ModelSpec, kind: Layer, shape: Shape, device: Device) -> float:
    """Return the memory traffic in bytes of norms, residuals, RoPE, activations and casts, both passes.

    A roofline of values read or written per token; it agrees with the published rates of one device.
    """
    hidden, tp = model.hidden_size, shape.tp
    part = tp if shape.sequence_parallel else 1
    query, _ = head_widths(model)
    groups = model.num_attention_heads if model.mla.kv_lora_rank else model.num_query_groups or 1
    rotated = query * (model.num_attention_heads + groups) / tp
    stack = device.stack
    inner = _inner_traffic(model, stack)
    values = stack.norm_traffic.value * hidden / part + stack.rotary_traffic.value * rotated
    casts: float = 2 * hidden
    if model.attention_output_gate:
        gates = query * model.num_attention_heads / tp
        values += stack.output_gate_traffic.value * gates
        casts += gates
    if kind.experts:
        moe = model.moe
        arriving = shape.expert_rows.arriving / part
        width = arriving * (moe.ffn_hidden_size or model.ffn_hidden_size) / shape.etp
        values += inner * (width + moe.shared_ffn_hidden_size / tp) + _permutation_values(model, shape)
        casts += 2 * arriving * hidden + 3 * width
    else:
        values += inner * model.ffn_hidden_size / tp
        casts += 2 * hidden + 3 * model.ffn_hidden_size / tp
    casts += 2 * rotated
    traffic = shape.tokens * device.element * values
    if not device.float8 or kind.bf16:
        return traffic
    weights = sum(product.k * product.n * product.count for product in _matmuls(model, kind, shape))
    return traffic + stack.cast_traffic.value * shape.tokens * casts + stack.weight_cast_traffic.value * weights


def _permutation_values(model: ModelSpec, shape: Shape) -> float:
    """Return the values moved per token by the permutation of rows and its inverse, both passes."""
    part = shape.tp if shape.sequence_parallel else 1
    return c.DISPATCH_TRAFFIC.value * shape.expert_rows.sent * model.hidden_size / part


def _inner_traffic(model: ModelSpec, stack: Stack) -> float:
    """Return the values moved per inner value of the feed-forward block."""
    if model.activation == "swiglu":
        return stack.swiglu_traffic.value
    return (stack.gated_traffic if model.activation in GATED else stack.plain_traffic).value


_SUM_TRAFFIC = 8
"""Bytes per weight of adding a chunk's product to the fp32 sum, which is read and written."""
_PRODUCT_TRAFFIC = 4
"""Further bytes per weight in half precision: the product is written and read; in fp32 the matmul adds to the sum."""


def head_time(model: ModelSpec, shape: Shape, device: Device, chunks: int) -> float:
    """Return the seconds of head and loss for one microbatch, both passes.

    In chunks of tokens each adds its product to an fp32 sum of the weight's gradient.
    """
    vocabulary = vocabulary_rows(model.vocab_size or 1, shape.tp) / shape.tp
    rows = max(1.0, shape.tokens / chunks)
    matmul = matmul_seconds(rows, model.hidden_size, vocabulary, device.head_flops) * (1 + c.BACKWARD.value)
    traffic = _SUM_TRAFFIC + (_PRODUCT_TRAFFIC if device.element < 4 else 0)
    sums = traffic * model.hidden_size * vocabulary if chunks > 1 else 0.0
    fused = device.stack.fused_logit_traffic
    per_logit = device.stack.logit_traffic.value if fused is None else fused.value * device.element
    logits = rows * vocabulary * per_logit
    return chunks * (matmul + (logits + sums) / device.memory)
