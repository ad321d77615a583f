"""Whose kernels a time model describes: one profile for each training stack, of which this engine has two.

A profile holds what differs between stacks: the efficiency of matmuls in whole training steps, the passes over memory
of norms, RoPE, activations, casts and the loss, the kernel of attention, and what sharding and overlap cost.
`engine_stack` selects this engine's by `train.compile`; the others are those of published runs, to which the model is
held (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from megalaunch.plan.attention_choice import describe_backend
from megalaunch.plan.cost.constants import Constant
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.platforms import TRITON_DEVICES
from megalaunch.schema import RunSpec
from megalaunch.schema.precision import Float8Recipe


@dataclass(frozen=True, eq=False)
class Stack:
    """The kernels of one training stack.

    Attributes:
        name: the stack, as tables show it.
        meaning: its kernels, in one phrase.
        attention: whose choice of an attention kernel: this engine's, or always cuDNN or flash attention.
        matmul_16, matmul_8: efficiency of large matmuls within a training step, of the 16-bit and 8-bit peak.
        norm_traffic: values moved per hidden value by the norms and residuals of a layer, both passes.
        rotary_traffic: values moved per value with RoPE, both passes.
        output_gate_traffic: values moved per value of attention's output by its gate, both passes.
        swiglu_traffic, gated_traffic, plain_traffic: values moved per inner value of SwiGLU, of other gated blocks and
            of plain ones, both passes.
        cast_traffic: bytes moved per value of inputs and gradients of fp8 matmuls: amax, scale, cast, transpose.
        weight_cast_traffic: the same per weight and microbatch.
        logit_traffic: bytes moved per logit by loss and gradient.
        fused_logit_traffic: values of the compute dtype moved per logit by kernels that take the loss of logits in that
            dtype; None: `logit_traffic`.
        gather_copy, reduce_copy: bytes copied per parameter around an all-gather and around a reduce-scatter.
        overlap_slowdown: compute slowdown by an overlapped collective, of its time.
        tp_exposed: tensor-parallel communication exposed with tp_comm_overlap.
        ring_gradient_bytes: bytes per value of the gradients of keys and values that p2p context parallelism sends.
        selective_matmuls: share of a layer's matmuls that selective recomputation repeats, where it chooses by
            operator; 0: those of the recomputed modules.
        launches: operators that the host launches per layer, both passes.
        frees_stages: whether the weights of virtual stages are freed and gathered again, by torch's pipeline runtime.
    """

    name: str
    meaning: str
    attention: Literal["engine", "cudnn", "flash"]
    matmul_16: Constant
    matmul_8: Constant
    norm_traffic: Constant
    rotary_traffic: Constant
    output_gate_traffic: Constant
    swiglu_traffic: Constant
    gated_traffic: Constant
    plain_traffic: Constant
    cast_traffic: Constant
    weight_cast_traffic: Constant
    logit_traffic: Constant
    gather_copy: Constant
    reduce_copy: Constant
    overlap_slowdown: Constant
    tp_exposed: Constant
    selective_matmuls: Constant
    launches: Constant
    fused_logit_traffic: Constant | None = None
    ring_gradient_bytes: int = 2
    frees_stages: bool = False

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The profile's constants, in their order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, Constant))

    def with_value(self, name: str, value: float) -> Stack:
        """Return the profile with another value of one constant."""
        return replace(self, **{name: replace(getattr(self, name), value=value)})


_MATMUL_16 = "efficiency of large matmuls, of the 16-bit peak"
_MATMUL_8 = "efficiency of large matmuls, of the 8-bit peak"
_NORM = "values moved per hidden value by norms and residuals, both passes of a layer"
_ROTARY = "values moved per value with RoPE, both passes"
_OUTPUT_GATE = "values moved per value of attention's output by its gate, both passes"
_SWIGLU = "values moved per inner value of SwiGLU, both passes"
_GATED = "values moved per inner value of another gated block, both passes"
_PLAIN = "values moved per inner value of a plain block, both passes"
_CAST = "bytes moved per value cast to 8 bits for the matmuls of a layer"
_WEIGHT_CAST = "bytes moved per weight cast to 8 bits, each microbatch"
_LOGIT = "bytes moved per logit by loss and gradient"
_FUSED_LOGIT = "values moved per logit by the kernels of the loss"
_GATHER = "bytes copied per all-gathered parameter"
_REDUCE = "bytes copied per reduce-scattered gradient"
_SLOWDOWN = "compute slowdown by an overlapped collective, of its time"
_TP = "tensor-parallel communication exposed with tp_comm_overlap"
_SELECTIVE = "share of a layer's matmuls repeated by selective recomputation by operator"
_LAUNCHES = "operators launched per layer, both passes"

# MATMUL_16, MATMUL_8 and TP_EXPOSED are calibrated, by one row each (tests/plan/test_step_time_anchors.py).
MEGATRON = Stack(
    "Megatron",
    "NVIDIA's Megatron-Core and Transformer Engine: fused kernels, cuDNN attention",
    "cudnn",
    matmul_16=Constant(
        _MATMUL_16,
        0.653,
        "calibrated: Llama-3.1-70B bf16 on 64 H100 (dgxc); a single matmul reaches 0.80, before power limits (MAMF)",
    ),
    matmul_8=Constant(
        _MATMUL_8,
        0.615,
        "calibrated: Llama-3.1-405B FP8 on 1024 H100 (Megatron-Bridge); a single matmul reaches 0.71 (MAMF)",
    ),
    norm_traffic=Constant(_NORM, 16.0, "fused kernels read and write each value once"),
    rotary_traffic=Constant(_ROTARY, 4.0, "the same"),
    output_gate_traffic=Constant(_OUTPUT_GATE, 8.0, "the same"),
    swiglu_traffic=Constant(_SWIGLU, 8.0, "the same"),
    gated_traffic=Constant(_GATED, 8.0, "the same"),
    plain_traffic=Constant(_PLAIN, 5.0, "the same"),
    cast_traffic=Constant(_CAST, 6.0, "assumed: fused amax, scale and transpose"),
    weight_cast_traffic=Constant(_WEIGHT_CAST, 0.0, "once a step, with the update"),
    logit_traffic=Constant(_LOGIT, 44.0, "18.2 ms, 8192 x 131072, H100 (Liger)"),
    gather_copy=Constant(_GATHER, 0.0, "contiguous buffers"),
    reduce_copy=Constant(_REDUCE, 0.0, "contiguous buffers"),
    overlap_slowdown=Constant(_SLOWDOWN, 0.1, "assumed"),
    tp_exposed=Constant(_TP, 0.37, "calibrated: Llama-3.1-405B bf16 on 512 H100 (dgxc)"),
    selective_matmuls=Constant(_SELECTIVE, 0.0, "recomputes by module"),
    launches=Constant(_LAUNCHES, 60.0, "assumed: fused kernels"),
)

# torch's own kernels; a compiler joins those between matmuls and attention. Norms: two, each 4 bytes a value forward at
# 0.78 of the bandwidth and 6 backward at 0.37 (RMSNorm of torch.compile: 1.75 of H200's 4.8 TB/s), and two residuals,
# of which the compiler saves passes. SwiGLU: 1.24 ms for 8192 x 16384 (Triton, Liger), 2.98 ms operator by operator.
# Operator by operator in fp32 a norm moves 106 bytes a value and RoPE 44.
PYTORCH_COMPILED = replace(
    MEGATRON,
    name="PyTorch, compiled",
    meaning="torch.compile of each block, FSDP2, torch's flash attention",
    attention="flash",
    matmul_16=replace(MEGATRON.matmul_16, source="cuBLAS, as in the Megatron rows"),
    matmul_8=replace(MEGATRON.matmul_8, source="cuBLAS, as in the Megatron rows"),
    norm_traffic=Constant(_NORM, 22.6, "backward at 1.75 of 4.8 TB/s (torch.compile, H200)"),
    swiglu_traffic=Constant(_SWIGLU, 12.0, "1.24 ms, 8192 x 16384, H100 (Triton, Liger)"),
    gated_traffic=Constant(_GATED, 12.0, "as SwiGLU"),
    cast_traffic=Constant(_CAST, 10.0, "amax, and cast to two layouts"),
    weight_cast_traffic=Constant(_WEIGHT_CAST, 10.0, "the same"),
    gather_copy=Constant(_GATHER, 4.0, "FSDP2 copies out of the gathered buffer: 2 read, 2 written"),
    reduce_copy=Constant(_REDUCE, 6.0, "FSDP2 copies into the reduced buffer: 2 read, 4 written"),
    overlap_slowdown=Constant(_SLOWDOWN, 0.24, "NCCL's 32 channels occupy 32 of 132 SMs"),
    tp_exposed=replace(MEGATRON.tp_exposed, source="as in the Megatron rows"),
    launches=Constant(_LAUNCHES, 60.0, "assumed"),
)
PYTORCH_EAGER = replace(
    PYTORCH_COMPILED,
    name="PyTorch, eager",
    meaning="one kernel an operator, norms and RoPE in fp32, FSDP2, torch's flash attention",
    norm_traffic=Constant(_NORM, 118.0, "counted: norms of 18 operators in fp32, residuals"),
    rotary_traffic=Constant(_ROTARY, 22.0, "counted: complex product in fp32, casts"),
    output_gate_traffic=Constant(_OUTPUT_GATE, 14.0, "counted: sigmoid 5, product 9"),
    swiglu_traffic=Constant(_SWIGLU, 29.0, "2.98 ms, 8192 x 16384, H100 (operator by operator, Liger)"),
    gated_traffic=Constant(_GATED, 29.0, "as SwiGLU"),
    launches=Constant(_LAUNCHES, 150.0, "counted"),
)
# llmq: C++ on one NVIDIA GPU; its loss overwrites 16-bit logits with their gradients, in one kernel.
LLMQ = replace(
    MEGATRON,
    name="llmq",
    meaning="C++ on one NVIDIA GPU: fused kernels, cuDNN attention, 16-bit logits overwritten by their gradients",
    logit_traffic=Constant(_LOGIT, 6.0, "read twice and written once in 16 bits"),
)

_FUSED_LOSS = Constant(_FUSED_LOGIT, 3.0, "read twice and written once (kernels/linear_loss_triton.py); not measured")

# engine/model: add_norm_triton.py adds the output of attention and computes the second norm, in one pass of four values
# each way; the first norm is a kernel of the same file, two values forward and three backward, and the addition
# after the MLP is apart, as is that of its gradients. rope_triton.py reads and writes a value once each way,
# swiglu_triton.py is SwiGLU, geglu_triton.py the other gated blocks. float8_cast_triton.py reads a value in 16 bits for
# its amax (2 bytes) and for its cast (2, and 1 written): an input or weight twice, a gradient once for both layouts.
# Those are tensorwise scales; `_TRITON_CASTS` has the others.
# Without Triton a norm, an addition and a rotation are torch's operators, rope.py passes five times over queries and
# keys, a cast is nine operators (33 bytes), and the second layout of a gradient a copy (2).
ENGINE_EAGER = replace(
    PYTORCH_EAGER,
    name="megalaunch, eager",
    meaning="torch's kernels, one an operator; Triton norms, SwiGLU, GEGLU, RoPE, fp8 casts; FSDP2",
    attention="engine",
    norm_traffic=Constant(_NORM, 26.8, "one of two additions fused (add_norm_triton.py); norms backward at 0.37"),
    rotary_traffic=Constant(_ROTARY, 4.0, "read and written once each way (kernels/rope_triton.py)"),
    swiglu_traffic=Constant(_SWIGLU, 12.0, "kernels/swiglu_triton.py, as Liger's: 1.24 ms, 8192 x 16384, H100"),
    gated_traffic=Constant(_GATED, 12.0, "kernels/geglu_triton.py, which moves as many values as SwiGLU's"),
    cast_traffic=Constant(_CAST, 8.0, "inputs 10, gradients 6 (kernels/float8_cast_triton.py)"),
    weight_cast_traffic=Constant(_WEIGHT_CAST, 10.0, "amax and cast, twice (kernels/float8_cast_triton.py)"),
    launches=Constant(_LAUNCHES, 65.0, "counted in a simulated layer"),
    fused_logit_traffic=_FUSED_LOSS,
    ring_gradient_bytes=4,
    frees_stages=True,
)
# Bytes moved by the casts of (an input, a gradient, a weight) for two matmuls each: a cast reads 2 and writes 1, an
# amax of its own reads 2. A gradient is read once for both matmuls, except by scales of rows. Blocks and delayed scales
# take the amax with the cast.
_TRITON_CASTS: Mapping[Float8Recipe, tuple[int, int, int]] = MappingProxyType(
    {
        "tensorwise": (10, 6, 10),
        "rowwise": (10, 10, 10),
        "delayed": (6, 4, 6),
        "blockwise": (6, 4, 6),
        "mxfp8": (6, 4, 6),
    }
)


@cache
def _eager_in_fp8(recipe: Float8Recipe, wgrad: bool) -> Stack:
    """Return the eager profile with the casts of a recipe; weight gradients in 16 bits need no casts."""
    inputs, gradients, weights = map(float, _TRITON_CASTS[recipe])
    if not wgrad:
        inputs = gradients = inputs / 2
    where = f"of {recipe} scales (kernels/float8_cast_triton.py)"
    return replace(
        ENGINE_EAGER,
        cast_traffic=Constant(_CAST, (inputs + gradients) / 2, f"inputs {inputs:g}, gradients {gradients:g} {where}"),
        weight_cast_traffic=Constant(_WEIGHT_CAST, weights, f"two casts {where}"),
    )


# Linear layers by Transformer Engine, which casts in one kernel, and weights once a step.
ENGINE_TRANSFORMER_ENGINE = replace(
    ENGINE_EAGER,
    name="megalaunch with Transformer Engine",
    meaning=f"linear layers by Transformer Engine; else {ENGINE_EAGER.meaning}",
    cast_traffic=MEGATRON.cast_traffic,
    weight_cast_traffic=Constant(_WEIGHT_CAST, 0.0, "once a step"),
)
ENGINE_COMPILED = replace(
    PYTORCH_COMPILED,
    name="megalaunch, compiled",
    meaning="torch.compile of each block; FSDP2",
    attention="engine",
    fused_logit_traffic=_FUSED_LOSS,
    ring_gradient_bytes=4,
    frees_stages=True,
)


_PLAIN_CASTS = Constant(_CAST, 50.5, "nine operators: inputs twice, gradients once (kernels/float8_cast.py)")
_PLAIN_WEIGHT_CASTS = Constant(_WEIGHT_CAST, 66.0, "nine operators, twice (kernels/float8_cast.py)")
ENGINE_WITHOUT_TRITON = replace(
    ENGINE_EAGER,
    meaning="torch's kernels, one an operator; FSDP2",
    fused_logit_traffic=None,
    norm_traffic=Constant(_NORM, 28.6, "fused norms, backward at 0.37 of the bandwidth; residuals apart"),
    rotary_traffic=Constant(_ROTARY, 10.0, "five passes each way (engine/model/rope.py)"),
    swiglu_traffic=PYTORCH_EAGER.swiglu_traffic,
    gated_traffic=PYTORCH_EAGER.gated_traffic,
    cast_traffic=_PLAIN_CASTS,
    weight_cast_traffic=_PLAIN_WEIGHT_CASTS,
)
_EAGER_WITH_PLAIN_CASTS = replace(ENGINE_EAGER, cast_traffic=_PLAIN_CASTS, weight_cast_traffic=_PLAIN_WEIGHT_CASTS)


# An emulated product reads an operand in 8 bits, writes it in fp32, and multiplies it by its inverse scale in place
# (1 + 4 + 8 bytes); a compiler joins both (5). Its result in fp32 is read, and written in 16 bits (6).
_DEQUANTIZE, _DEQUANTIZE_COMPILED, _ROUND = 13.0, 5.0, 6.0


@cache
def _emulated(stack: Stack, wgrad: bool) -> Stack:
    """Return the profile of a stack that emulates fp8: casts as before, and the traffic of fp32 products.

    An input, a gradient of an output, and a weight are each an operand of two products, and the result of a third.
    """
    once = _DEQUANTIZE_COMPILED if stack is ENGINE_COMPILED else _DEQUANTIZE
    values = (2 if wgrad else 1) * once + _ROUND
    weights = 2 * once + (_ROUND if wgrad else 0.0)

    def more(casts: Constant, added: float) -> Constant:
        return replace(casts, value=casts.value + added, source=f"{casts.source}; to fp32 and back: {added:g}")

    return replace(
        stack,
        meaning=f"{stack.meaning}; fp8 emulated in fp32",
        cast_traffic=more(stack.cast_traffic, values),
        weight_cast_traffic=more(stack.weight_cast_traffic, weights),
    )


def engine_stack(spec: RunSpec) -> Stack:
    """Return the profile of this engine for a run: its layers launched by operator, or replayed as CUDA graphs."""
    stack = _launched_stack(spec)
    if spec.precision.emulates_fp8:
        stack = _emulated(stack, spec.precision.fp8.wgrad)
    return _replayed(stack) if spec.train.cuda_graphs else stack


@cache
def _replayed(stack: Stack) -> Stack:
    """Return the profile of layers that are replayed as CUDA graphs."""
    return replace(
        stack,
        meaning=f"{stack.meaning}; layers replayed as CUDA graphs",
        launches=Constant(
            _LAUNCHES, 4.0, "graphs of two passes, copies of two inputs (engine/parallel/layer_graphs.py)"
        ),
    )


def _launched_stack(spec: RunSpec) -> Stack:
    """Return the profile of this engine for a run: blocks compiled or eager, or with Transformer Engine's layers."""
    if spec.precision.uses_transformer_engine:
        return ENGINE_TRANSFORMER_ENGINE
    if spec.train.compile:
        return ENGINE_COMPILED
    chip, fp8 = CHIPS.get(spec.platform.chip), spec.precision.fp8
    if chip is not None and chip.device not in TRITON_DEVICES:
        return ENGINE_WITHOUT_TRITON
    if spec.precision.compute_dtype != "fp8":
        return ENGINE_EAGER
    return _eager_in_fp8(fp8.recipe, fp8.wgrad) if _casts_by_triton(spec) else _EAGER_WITH_PLAIN_CASTS


def _casts_by_triton(spec: RunSpec) -> bool:
    """Return whether Triton kernels cast: on NVIDIA GPUs with fp8 units (kernels/float8_cast.py)."""
    chip = CHIPS.get(spec.platform.chip)
    return chip is None or (chip.is_nvidia and "fp8" in chip.peak_flops)


def describe_kernels(spec: RunSpec, stack: Stack) -> tuple[tuple[str, str], ...]:
    """Return which kernels a plan assumes, as (part of the step, kernels)."""
    chunks, compute = count_loss_chunks(spec), spec.precision.compute_dtype
    rows = [
        ("blocks", stack.meaning),
        ("attention", describe_backend(spec)),
        (
            "head and loss",
            f"{'whole logits' if chunks == 1 else f'logits of one of {chunks} chunks'}, {_loss(stack)}",
        ),
    ]
    units = "fp32 on TF32 tensor cores" if spec.precision.tf32 else "fp32, no tensor cores"
    if compute == "fp32":
        rows.append(("matmuls", units))
    if spec.precision.emulates_fp8:
        rows.append(("matmuls", f"fp8 emulated in {units}"))
    if compute == "fp8":
        rows.append(("casts to fp8", _casts(spec)))
    return tuple(rows)


def _loss(stack: Stack) -> str:
    return "in fp32" if stack.fused_logit_traffic is None else "by Triton"


def _casts(spec: RunSpec) -> str:
    if spec.precision.uses_transformer_engine:
        return "by Transformer Engine"
    if spec.train.compile:
        return "compiled"
    return "by Triton" if _casts_by_triton(spec) else "operator by operator: much slower than compiled"
