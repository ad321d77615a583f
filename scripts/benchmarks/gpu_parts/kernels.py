"""Each kernel, forward and backward, in several forms: the reference, ours, torch.compile of the reference, Liger's.

`ours` is what the dispatch of kernels/ selects on this device. A form that raises is reported and costs no other form.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.setting import Setting
from gpu_parts.timing import median_seconds, relative_error
from megalaunch.engine.model.attention.core import whole_sample_attention
from megalaunch.engine.model.rope import RopeCache, apply_rope_to_both
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.engine.train.loss import LinearCrossEntropy
from megalaunch.kernels.add_norm import add_norm, add_norm_reference
from megalaunch.kernels.causal_attention import causal_sdpa
from megalaunch.kernels.flex_attention import flex_operator, make_flex_mask
from megalaunch.kernels.float8_cast import (
    E4M3,
    REFERENCE,
    Float8Matrix,
    block_amax,
    power_of_two_scale,
    scale_from_amax,
)
from megalaunch.kernels.forms import Block
from megalaunch.kernels.geglu import geglu, geglu_reference
from megalaunch.kernels.grouped_linear import grouped_linear, grouped_linear_by, grouped_linear_reference
from megalaunch.kernels.layer_norm import layer_norm, layer_norm_reference
from megalaunch.kernels.linear_matmuls import linear_by
from megalaunch.kernels.permute import permute, sort_by_expert, unpermute
from megalaunch.kernels.rms_norm import rms_norm, rms_norm_reference
from megalaunch.kernels.swiglu import swiglu, swiglu_reference
from megalaunch.kernels.tensor_norms import per_tensor_norms
from megalaunch.plan.attention_choice import TakenBackend
from megalaunch.schema.precision import Float8Spec

Form = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Shapes: those of Llama-3.2-1B and of Qwen3's experts, or tiny ones."""

    tokens: int = 16384
    hidden: int = 2048
    ffn: int = 8192
    vocabulary: int = 128256
    sequence: int = 8192
    heads: int = 32
    groups: int = 8
    experts: int = 128
    choices: int = 8
    expert_ffn: int = 768
    tensors: int = 64
    tensor: int = 1 << 22


SMALL = Sizes(64, 64, 128, 512, 64, 4, 2, 4, 2, 32, 3, 1 << 10)


@dataclass(frozen=True)
class Kernel:
    """One kernel on given inputs; a step of training reads and writes `bytes` at least, and computes `flops`.

    `backward` is False where there is none. `fp8`: the flops are those of fp8 matmuls.
    """

    inputs: tuple[Tensor, ...]
    forms: dict[str, Form]
    bytes: float = 0.0
    flops: float = 0.0
    backward: bool = True
    fp8: bool = False


def _liger() -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    import liger_kernel.transformers.functional as liger

    return liger


class _Inputs:
    """Random leaves on the device."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.sizes = setting, SMALL if setting.small else Sizes()
        self._generator = torch.Generator(setting.device).manual_seed(0)

    def randn(self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, device=self.setting.device, generator=self._generator) * scale
        return made.to(dtype).requires_grad_()

    def compiled(self, forms: dict[str, Form], reference: Form) -> dict[str, Form]:
        """The forms, with the compiled reference if torch.compile is used."""
        return {**forms, "torch.compile": torch.compile(reference)} if self.setting.compile else forms


def _rms_norm(at: _Inputs) -> Kernel:
    s = at.sizes
    x, weight = at.randn(s.tokens, s.hidden), at.randn(s.hidden)
    forms: dict[str, Form] = {
        "reference": lambda x, w: rms_norm_reference(x, w, 1e-5),
        "ours": lambda x, w: rms_norm(x, w, 1e-5),
    }
    if (liger := _liger()) is not None:
        forms["liger"] = lambda x, w: liger.liger_rms_norm(x, w, 1e-5)
    return Kernel((x, weight), at.compiled(forms, forms["reference"]), bytes=5 * x.nbytes)


def _add_rms_norm(at: _Inputs) -> Kernel:
    s = at.sizes
    x, update, weight = at.randn(s.tokens, s.hidden), at.randn(s.tokens, s.hidden), at.randn(s.hidden)

    def reference(x: Tensor, update: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm_reference(x, update, w, None, 1e-5, x.dtype)

    forms: dict[str, Form] = {
        "reference": reference,
        "ours": lambda x, update, w: add_norm(x, update, w, None, 1e-5, x.dtype),
    }
    return Kernel((x, update, weight), at.compiled(forms, reference), bytes=8 * x.nbytes)


def _layer_norm(at: _Inputs) -> Kernel:
    s = at.sizes
    x, weight, bias = at.randn(s.tokens, s.hidden), at.randn(s.hidden), at.randn(s.hidden)

    forms: dict[str, Form] = {
        "reference": lambda x, w, b: layer_norm_reference(x, w, b, 1e-5),
        "ours": lambda x, w, b: layer_norm(x, w, b, 1e-5),
    }
    if (liger := _liger()) is not None:
        forms["liger"] = lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)
    return Kernel((x, weight, bias), at.compiled(forms, forms["reference"]), bytes=5 * x.nbytes)


def _swiglu(at: _Inputs) -> Kernel:
    s = at.sizes
    gate, up = at.randn(s.tokens, s.ffn), at.randn(s.tokens, s.ffn)
    forms: dict[str, Form] = {"reference": swiglu_reference, "ours": swiglu}
    if (liger := _liger()) is not None:
        forms["liger"] = liger.liger_swiglu
    return Kernel((gate, up), at.compiled(forms, swiglu_reference), bytes=8 * gate.nbytes)


def _geglu(at: _Inputs) -> Kernel:
    s = at.sizes
    gate, up = at.randn(s.tokens, s.ffn), at.randn(s.tokens, s.ffn)
    reference = partial(geglu_reference, variant="geglu_tanh")
    forms: dict[str, Form] = {"reference": reference, "ours": partial(geglu, variant="geglu_tanh")}
    if (liger := _liger()) is not None:
        forms["liger"] = liger.liger_geglu
    return Kernel((gate, up), at.compiled(forms, reference), bytes=8 * gate.nbytes)


def _rope(at: _Inputs) -> Kernel:
    s = at.sizes
    q, k = at.randn(2, s.heads, s.tokens // 2, 64), at.randn(2, s.groups, s.tokens // 2, 64)
    angles = torch.rand(s.tokens // 2, 32, device=q.device).repeat(1, 2)
    cache = RopeCache(angles.cos().to(q.dtype), angles.sin().to(q.dtype))

    def reference(q: Tensor, k: Tensor) -> list[Tensor]:
        def half(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((-second, first), dim=-1)

        return [x * cache.cos + half(x) * cache.sin for x in (q, k)]

    forms: dict[str, Form] = {
        "reference": reference,
        "ours": lambda q, k: apply_rope_to_both(q, k, cache),
    }
    if (liger := _liger()) is not None:
        forms["liger"] = lambda q, k: liger.liger_rope(q, k, cache.cos[None], cache.sin[None])
    return Kernel((q, k), at.compiled(forms, reference), bytes=4 * (q.nbytes + k.nbytes))


def _attention(width: int) -> Callable[[_Inputs], Kernel]:
    def build(at: _Inputs) -> Kernel:
        s = at.sizes
        q = at.randn(1, s.heads, s.sequence, width)
        k, v = at.randn(1, s.groups, s.sequence, width), at.randn(1, s.groups, s.sequence, width)

        def by(backend: SDPBackend) -> Form:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            return call

        forms: dict[str, Form] = {"flash": by(SDPBackend.FLASH_ATTENTION)}
        if at.setting.device == "cuda":
            forms["cudnn"] = by(SDPBackend.CUDNN_ATTENTION)
            mask = make_flex_mask(lambda b, h, i, j: i >= j, None, s.sequence, s.sequence, q.device)
            forms["flex"] = lambda q, k, v: flex_operator(q)(q, k, v, block_mask=mask, enable_gqa=True)
        forms["ours"] = lambda q, k, v: causal_sdpa(q, k, v, None)
        return Kernel((q, k, v), forms, flops=3.5 * 2 * s.sequence**2 * s.heads * width)

    return build


def _packed_attention(at: _Inputs) -> Kernel:
    """Causal attention within documents of a half, a quarter and two eighths of a sample."""
    s, width = at.sizes, 128
    q = at.randn(1, s.heads, s.sequence, width)
    k, v = at.randn(1, s.groups, s.sequence, width), at.randn(1, s.groups, s.sequence, width)
    lengths = tuple(s.sequence // part for part in (2, 4, 8, 8))
    numbers = torch.arange(len(lengths), device=q.device)
    documents = numbers.repeat_interleave(torch.tensor(lengths, device=q.device))[None]

    def by(backend: TakenBackend) -> Form:
        return whole_sample_attention(s.sequence, documents, (lengths,), None, backend)

    on_cuda = at.setting.device == "cuda"
    forms: dict[str, Form] = {"flash, block by block": by("flash")}
    if on_cuda:
        forms["flex"] = by("flex")
    forms["ours"] = by("varlen" if on_cuda else "auto")  # what the engine takes by itself
    pairs = sum(length**2 / 2 for length in lengths)
    return Kernel((q, k, v), forms, flops=3.5 * 4 * pairs * s.heads * width)


def _linear_cross_entropy(at: _Inputs) -> Kernel:
    """Head and loss: whole logits in fp32, or chunks of 2,048 tokens, as the training cases have."""
    s = at.sizes
    tokens = s.tokens // 2
    x, weight = at.randn(tokens, s.hidden), at.randn(s.vocabulary, s.hidden, scale=0.02)
    labels = torch.randint(0, s.vocabulary, (tokens,), device=x.device)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels, reduction="sum")

    def ours(x: Tensor, w: Tensor) -> Tensor:
        decoder: Any = SimpleNamespace(  # what the loss asks of a decoder on one rank
            tp_region=NO_TP,
            head=SimpleNamespace(weight=w, layout=None),
            vocabulary_columns=s.vocabulary,
            config=SimpleNamespace(final_logit_softcapping=None),
            softcap_logits=lambda logits: logits,
        )
        return LinearCrossEntropy(decoder, max(tokens // 2048, 2)).from_hidden(x[None], labels[None])

    forms: dict[str, Form] = {"reference": reference, "ours": ours}
    if (liger := _liger()) is not None:
        forms["liger"] = lambda x, w: liger.liger_fused_linear_cross_entropy(x, w, labels, reduction="sum")
    return Kernel((x, weight), at.compiled(forms, reference), flops=6 * x.numel() * s.vocabulary)


def _experts(at: _Inputs) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return rows, the matrices of their experts, the offsets of even loads, and the operations of a step."""
    s = at.sizes
    rows = s.tokens * s.choices // 2
    x, weight = at.randn(rows, s.hidden), at.randn(s.experts, s.expert_ffn, s.hidden, scale=0.02)
    offsets = torch.arange(1, s.experts + 1, device=x.device, dtype=torch.int32) * (rows // s.experts)
    return x, weight, offsets, 6 * rows * s.hidden * s.expert_ffn


def _grouped_linear(at: _Inputs) -> Kernel:
    x, weight, offsets, flops = _experts(at)
    forms: dict[str, Form] = {
        "reference": lambda x, w: grouped_linear_reference(x, w, offsets),
        "ours": lambda x, w: grouped_linear(x, w, offsets),
    }
    return Kernel((x, weight), forms, flops=flops)


def _float8_grouped_linear(recipe: str) -> Callable[[_Inputs], Kernel]:
    def build(at: _Inputs) -> Kernel:
        x, weight, offsets, flops = _experts(at)
        spec = Float8Spec(recipe=recipe, format="e4m3")  # type: ignore[arg-type]
        matmuls = Float8GroupedMatmuls(spec, at.setting.device != "cuda", lambda operand, amax: amax, None)
        forms: dict[str, Form] = {
            "bf16": lambda x, w: grouped_linear(x, w, offsets),
            "ours": lambda x, w: grouped_linear_by(matmuls, x, w, offsets),
        }
        return Kernel((x, weight), forms, flops=flops, fp8=True)

    return build


def _permute(at: _Inputs) -> Kernel:
    s = at.sizes
    tokens = s.tokens // 2
    x, weights = at.randn(tokens, s.hidden), at.randn(tokens, s.choices, dtype=torch.float32)
    ids = torch.rand(tokens, s.experts, device=x.device).argsort(1)[:, : s.choices]
    permutation, _ = sort_by_expert(ids, s.experts)

    def reference(x: Tensor, weights: Tensor) -> Tensor:
        rows = x[permutation.pairs_R // s.choices]
        return (rows[permutation.rows_Tk] * weights[..., None]).sum(1).to(x.dtype)

    forms: dict[str, Form] = {
        "reference": reference,
        "ours": lambda x, weights: unpermute(permute(x, permutation), permutation, weights),
    }
    # forward: x read k times, rows written, read again, the sum written; backward: the same and the rows once more
    moved = (s.choices * 3 + 1 + s.choices * 4 + 1) * x.nbytes
    return Kernel((x, weights), at.compiled(forms, reference), bytes=moved)


def _float8_linear(recipe: str) -> Callable[[_Inputs], Kernel]:
    def build(at: _Inputs) -> Kernel:
        s = at.sizes
        x, weight = at.randn(s.tokens, 2 * s.hidden), at.randn(7 * s.hidden, 2 * s.hidden, scale=0.02)
        emulate = at.setting.device != "cuda"
        matmuls = Float8Matmuls(Float8Spec(recipe=recipe), emulate, lambda operand, amax: amax, None)  # type: ignore[arg-type]

        def ours(x: Tensor, w: Tensor) -> Tensor:
            return linear_by(matmuls, x, w)

        forms: dict[str, Form] = {"bf16": F.linear, "ours": ours}
        if at.setting.compile:
            forms["ours, compiled"] = torch.compile(ours)
        return Kernel((x, weight), forms, flops=6 * x.numel() * weight.shape[0], fp8=True)

    return build


def _float8_cast(block: Block, power_of_two: bool) -> Callable[[_Inputs], Kernel]:
    """A cast with the scales of its own blocks: of one read, against an amax and a cast that read twice."""

    def build(at: _Inputs) -> Kernel:
        x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()

        def reference(x: Tensor) -> Sequence[Tensor]:
            return REFERENCE.cast_blocks(x, block, power_of_two, E4M3)

        def ours(x: Tensor) -> Sequence[Tensor]:
            cast = Float8Matrix.quantize_blocks(x, block, E4M3, power_of_two=power_of_two)
            return cast.values, cast.scales

        def apart(x: Tensor) -> Sequence[Tensor]:
            amax = block_amax(x, block)
            scales = power_of_two_scale(amax, E4M3) if power_of_two else scale_from_amax(amax, E4M3)
            return Float8Matrix.quantize(x, scales, block, E4M3).values, scales

        forms: dict[str, Form] = {"reference": reference, "ours": ours, "ours, amax apart": apart}
        return Kernel((x,), at.compiled(forms, reference), bytes=3 * x.numel(), backward=False)

    return build


def _float8_cast_delayed(at: _Inputs) -> Kernel:
    x = at.randn(at.sizes.tokens, 2 * at.sizes.hidden).detach()
    scale = torch.full((1, 1), 100.0, device=x.device)

    def reference(x: Tensor) -> Sequence[Tensor]:
        return REFERENCE.cast_with_amax(x, scale, E4M3, True)

    def ours(x: Tensor) -> Sequence[Tensor]:
        rows, columns, amax = Float8Matrix.quantize_both_with_amax(x, scale, E4M3)
        return rows.values, columns.values, amax

    forms: dict[str, Form] = {"reference": reference, "ours": ours}
    return Kernel((x,), at.compiled(forms, reference), bytes=4 * x.numel(), backward=False)


def _adamw(at: _Inputs) -> Kernel:
    s = at.sizes
    parameters = [at.randn(s.tensor, dtype=torch.float32).detach() for _ in range(s.tensors)]
    gradients = [torch.randn_like(one) for one in parameters]

    def update(**options: bool) -> Form:
        leaves = [one.clone().requires_grad_() for one in parameters]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer = torch.optim.AdamW(leaves, lr=1e-4, **options)  # type: ignore[arg-type]

        def call() -> list[Tensor]:
            optimizer.step()
            return []

        return call

    forms: dict[str, Form] = {"foreach": update(foreach=True), "ours (torch, fused)": update(fused=True)}
    return Kernel((), forms, bytes=28 * s.tensor * s.tensors, backward=False)


def _grad_norm(at: _Inputs) -> Kernel:
    s = at.sizes
    gradients = [at.randn(s.tensor, dtype=torch.float32).detach() for _ in range(s.tensors)]
    forms: dict[str, Form] = {
        "reference": lambda: torch.stack([torch.linalg.vector_norm(one) for one in gradients]).norm(),
        "ours": lambda: per_tensor_norms(gradients).norm(),
    }
    return Kernel((), forms, bytes=4 * s.tensor * s.tensors, backward=False)


KERNELS: dict[str, Callable[[_Inputs], Kernel]] = {
    "attention, head 64": _attention(64),
    "attention, head 128": _attention(128),
    "attention, documents": _packed_attention,
    "linear and cross-entropy": _linear_cross_entropy,
    "RMSNorm": _rms_norm,
    "residual and RMSNorm": _add_rms_norm,
    "SwiGLU": _swiglu,
    "GEGLU, tanh": _geglu,
    "rope": _rope,
    "fp8 linear, tensorwise": _float8_linear("tensorwise"),
    "fp8 linear, rowwise": _float8_linear("rowwise"),
    "fp8 linear, blockwise": _float8_linear("blockwise"),
    "fp8 cast, 1 x 128": _float8_cast((1, 128), False),
    "fp8 cast, 128 x 128": _float8_cast((128, 128), False),
    "fp8 cast, mxfp8": _float8_cast((1, 32), True),
    "fp8 cast, delayed, both layouts": _float8_cast_delayed,
    "grouped linear": _grouped_linear,
    "fp8 grouped linear, rowwise": _float8_grouped_linear("rowwise"),
    "fp8 grouped linear, blockwise": _float8_grouped_linear("blockwise"),
    "permute and unpermute": _permute,
    "AdamW": _adamw,
    "gradient norm": _grad_norm,
    "LayerNorm": _layer_norm,
}


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """Return for each form its milliseconds, rate, and relative error of all results against the first form's."""
    torch.manual_seed(0)
    kernel = KERNELS[name](_Inputs(setting))
    expected: list[Tensor] | None = None
    upstream: list[Tensor] = []
    found: dict[str, Any] = {}
    for form, function in kernel.forms.items():
        try:
            if not upstream and kernel.backward:
                upstream = [torch.randn_like(one) for one in _outputs(kernel, function)]
            results = _run(kernel, function, upstream)
            expected = results if expected is None else expected
            error = max((relative_error(*both) for both in zip(results, expected, strict=True)), default=0.0)
            seconds = median_seconds(partial(_run, kernel, function, upstream), setting.device)
        except Exception as problem:
            found[form] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
            continue
        found[form] = {"milliseconds": 1e3 * seconds, "error": error}
        if kernel.bytes:
            found[form]["gigabytes_per_second"] = kernel.bytes / seconds / 1e9
        if kernel.flops:
            found[form]["tflops"] = kernel.flops / seconds / 1e12
    return {"forms": found, "fp8": kernel.fp8}


def _outputs(kernel: Kernel, function: Form) -> list[Tensor]:
    made = function(*kernel.inputs)
    return [made] if isinstance(made, Tensor) else list(made)


def _run(kernel: Kernel, function: Form, upstream: list[Tensor]) -> list[Tensor]:
    """Run forward and backward; return outputs and gradients."""
    outputs = _outputs(kernel, function)
    gradients = torch.autograd.grad(outputs, kernel.inputs, upstream) if kernel.backward else ()
    return [one.detach() for one in (*outputs, *gradients)]
