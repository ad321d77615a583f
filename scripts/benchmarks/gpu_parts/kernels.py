"""Each kernel, forward and backward, in several forms: the reference, ours, torch.compile of the reference, Liger's.

`ours` is what the dispatch of kernels/ selects on this device. A form that raises is reported and costs no other form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.float8_kernels import FLOAT8_KERNELS
from gpu_parts.kernel import Form, Inputs, Kernel, experts_inputs, liger_functions
from gpu_parts.setting import Setting
from gpu_parts.timing import median_seconds, relative_error
from megalaunch.engine.model.attention.core import whole_sample_attention
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.model.rope import RopeCache, apply_rope_to_both
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.engine.optimizer.update_rules import AdamW, Lion, ParameterState, Update
from megalaunch.engine.train.loss import LinearCrossEntropy
from megalaunch.kernels.add_norm import add_norm, add_norm_reference
from megalaunch.kernels.causal_attention import causal_sdpa
from megalaunch.kernels.flex_attention import flex_operator, make_flex_mask
from megalaunch.kernels.geglu import GegluVariant, geglu, geglu_reference
from megalaunch.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from megalaunch.kernels.layer_norm import layer_norm, layer_norm_reference
from megalaunch.kernels.permute import permute, sort_by_expert, unpermute
from megalaunch.kernels.rms_norm import rms_norm, rms_norm_reference
from megalaunch.kernels.swiglu import swiglu, swiglu_reference
from megalaunch.kernels.tensor_norms import per_tensor_norms
from megalaunch.plan.attention_choice import TakenBackend
from megalaunch.schema.optimizer import OptimizerSpec


def _rms_norm(at: Inputs) -> Kernel:
    s = at.sizes
    x, weight = at.randn(s.tokens, s.hidden), at.randn(s.hidden)
    forms: dict[str, Form] = {
        "reference": lambda x, w: rms_norm_reference(x, w, 1e-5),
        "ours": lambda x, w: rms_norm(x, w, 1e-5),
    }
    if (liger := liger_functions()) is not None:
        forms["liger"] = lambda x, w: liger.liger_rms_norm(x, w, 1e-5, in_place=False)
    return Kernel((x, weight), at.compiled(forms, forms["reference"]), bytes=5 * x.nbytes)


def _add_rms_norm(at: Inputs) -> Kernel:
    s = at.sizes
    x, update, weight = at.randn(s.tokens, s.hidden), at.randn(s.tokens, s.hidden), at.randn(s.hidden)

    def reference(x: Tensor, update: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm_reference(x, update, w, None, 1e-5, x.dtype)

    forms: dict[str, Form] = {
        "reference": reference,
        "ours": lambda x, update, w: add_norm(x, update, w, None, 1e-5, x.dtype),
    }
    if (liger := liger_functions()) is not None:
        forms["liger"] = lambda x, update, w: liger.liger_fused_add_rms_norm(x, update, w, 1e-5, in_place=False)[::-1]
    return Kernel((x, update, weight), at.compiled(forms, reference), bytes=8 * x.nbytes)


def _add_layer_norm(at: Inputs) -> Kernel:
    s = at.sizes
    x, update = at.randn(s.tokens, s.hidden), at.randn(s.tokens, s.hidden)

    def reference(x: Tensor, update: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm_reference(x, update, w, b, 1e-5, x.dtype)

    forms: dict[str, Form] = {
        "reference": reference,
        "ours": lambda x, update, w, b: add_norm(x, update, w, b, 1e-5, x.dtype),
    }
    inputs = (x, update, at.randn(s.hidden), at.randn(s.hidden))
    return Kernel(inputs, at.compiled(forms, reference), bytes=8 * x.nbytes)


def _layer_norm(at: Inputs) -> Kernel:
    s = at.sizes
    x, weight, bias = at.randn(s.tokens, s.hidden), at.randn(s.hidden), at.randn(s.hidden)

    forms: dict[str, Form] = {
        "reference": lambda x, w, b: layer_norm_reference(x, w, b, 1e-5),
        "ours": lambda x, w, b: layer_norm(x, w, b, 1e-5),
    }
    if (liger := liger_functions()) is not None:
        forms["liger"] = lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)
    return Kernel((x, weight, bias), at.compiled(forms, forms["reference"]), bytes=5 * x.nbytes)


def _swiglu(at: Inputs) -> Kernel:
    s = at.sizes
    gate, up = at.randn(s.tokens, s.ffn), at.randn(s.tokens, s.ffn)
    forms: dict[str, Form] = {"reference": swiglu_reference, "ours": swiglu}
    if (liger := liger_functions()) is not None:
        forms["liger"] = liger.liger_swiglu
    return Kernel((gate, up), at.compiled(forms, swiglu_reference), bytes=8 * gate.nbytes)


def _geglu(variant: GegluVariant) -> Callable[[Inputs], Kernel]:
    def build(at: Inputs) -> Kernel:
        s = at.sizes
        gate, up = at.randn(s.tokens, s.ffn), at.randn(s.tokens, s.ffn)
        reference = partial(geglu_reference, variant=variant)
        forms: dict[str, Form] = {"reference": reference, "ours": partial(geglu, variant=variant)}
        if variant == "geglu_tanh" and (liger := liger_functions()) is not None:  # the only one that Liger has
            forms["liger"] = liger.liger_geglu
        return Kernel((gate, up), at.compiled(forms, reference), bytes=8 * gate.nbytes)

    return build


def _rope(at: Inputs) -> Kernel:
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
    if (liger := liger_functions()) is not None:
        forms["liger"] = lambda q, k: liger.liger_rope(q, k, cache.cos[None], cache.sin[None])
    return Kernel((q, k), at.compiled(forms, reference), bytes=4 * (q.nbytes + k.nbytes))


def _attention(width: int) -> Callable[[Inputs], Kernel]:
    def build(at: Inputs) -> Kernel:
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


def _capped_attention(at: Inputs) -> Kernel:
    """Attention with a soft cap of its scores, as Gemma 2 has: in fp32 block by block, and what runs on GPUs take."""
    s, width = at.sizes, 128
    q = at.randn(1, s.heads, s.sequence, width)
    k, v = at.randn(1, s.groups, s.sequence, width), at.randn(1, s.groups, s.sequence, width)
    scoring = ScoreMod(soft_cap=50.0)

    def by(backend: TakenBackend) -> Form:
        attend = whole_sample_attention(s.sequence, None, None, None, backend)
        return lambda q, k, v: attend(q, k, v, scoring)

    forms: dict[str, Form] = {"scores in fp32": by("auto")}
    forms["ours"] = by("flex" if at.setting.device == "cuda" else "math")
    return Kernel((q, k, v), forms, flops=3.5 * 2 * s.sequence**2 * s.heads * width)


def _packed_attention(at: Inputs) -> Kernel:
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


def _masked_attention(window: int | None, has_sinks: bool) -> Callable[[Inputs], Kernel]:
    """Attention with a sliding window or sinks, heads of 64 as gpt-oss has: by blocks, and in one call."""

    def build(at: Inputs) -> Kernel:
        s, width = at.sizes, 64
        q = at.randn(1, s.heads, s.sequence, width)
        k, v = at.randn(1, s.groups, s.sequence, width), at.randn(1, s.groups, s.sequence, width)
        sinks = (at.randn(s.heads),) if has_sinks else ()

        def by(backend: TakenBackend) -> Form:
            attend = whole_sample_attention(s.sequence, None, None, window, backend)
            return lambda q, k, v, *sinks: attend(q, k, v, ScoreMod(sinks=sinks[0] if sinks else None))

        on_cuda = at.setting.device == "cuda"
        forms: dict[str, Form] = {"flash, block by block": by("flash")}
        if on_cuda and not has_sinks:
            forms["flex"] = by("flex")
        forms["ours"] = by(
            ("flex" if has_sinks else "varlen") if on_cuda else "auto"
        )  # what the engine takes by itself
        seen = s.sequence / 2 if window is None else min(window, s.sequence / 2)
        return Kernel((q, k, v, *sinks), forms, flops=3.5 * 4 * s.sequence * seen * s.heads * width)

    return build


def _linear_cross_entropy(at: Inputs) -> Kernel:
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
    if (liger := liger_functions()) is not None:
        forms["liger"] = lambda x, w: liger.liger_fused_linear_cross_entropy(x, w, labels, reduction="sum")
    return Kernel((x, weight), at.compiled(forms, reference), flops=6 * x.numel() * s.vocabulary)


def _grouped_linear(at: Inputs) -> Kernel:
    x, weight, offsets, flops = experts_inputs(at)
    forms: dict[str, Form] = {
        "reference": lambda x, w: grouped_linear_reference(x, w, offsets),
        "ours": lambda x, w: grouped_linear(x, w, offsets),
    }
    return Kernel((x, weight), forms, flops=flops)


def _permute(at: Inputs) -> Kernel:
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


def _adamw(at: Inputs) -> Kernel:
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


def _adamw_bf16(at: Inputs) -> Kernel:
    """AdamW with moments in bf16, on a GPU by our kernel, next to moments in fp32, by torch's."""
    s, rule = at.sizes, AdamW(OptimizerSpec())
    parameters = [at.randn(s.tensor, dtype=torch.float32).detach() for _ in range(s.tensors)]
    gradients = [torch.randn_like(one) for one in parameters]

    def update(dtype: torch.dtype) -> Form:
        def state(one: Tensor) -> ParameterState:
            moments = {name: torch.zeros_like(one, dtype=dtype) for name in rule.state_names}
            return ParameterState(moments, torch.zeros((), device=one.device))

        states = [state(one) for one in parameters]

        def call() -> list[Tensor]:
            rule.apply(Update(parameters, gradients, states, learning_rate=1e-4, weight_decay=0.1, divisor=1.0))
            return []

        return call

    forms: dict[str, Form] = {"moments in fp32": update(torch.float32), "ours": update(torch.bfloat16)}
    return Kernel((), forms, bytes=20 * s.tensor * s.tensors, backward=False)


def _lion(at: Inputs) -> Kernel:
    """Lion parameter by parameter, and on a GPU by our kernel."""
    s, rule = at.sizes, Lion(OptimizerSpec())
    parameters = [at.randn(s.tensor, dtype=torch.float32).detach() for _ in range(s.tensors)]
    gradients = [torch.randn_like(one) for one in parameters]
    states = [ParameterState({"exp_avg": torch.zeros_like(one)}, one.new_zeros(())) for one in parameters]
    update = Update(parameters, gradients, states, learning_rate=1e-4, weight_decay=0.1, divisor=1.0)

    def by(apply: Callable[[Update], None]) -> Form:
        def call() -> list[Tensor]:
            apply(update)
            return []

        return call

    forms = {"reference": by(rule._update), "ours": by(rule.apply)}
    return Kernel((), forms, bytes=20 * s.tensor * s.tensors, backward=False)


def _grad_norm(at: Inputs) -> Kernel:
    s = at.sizes
    gradients = [at.randn(s.tensor, dtype=torch.float32).detach() for _ in range(s.tensors)]
    forms: dict[str, Form] = {
        "reference": lambda: torch.stack([torch.linalg.vector_norm(one) for one in gradients]).norm(),
        "ours": lambda: per_tensor_norms(gradients).norm(),
    }
    return Kernel((), forms, bytes=4 * s.tensor * s.tensors, backward=False)


KERNELS: dict[str, Callable[[Inputs], Kernel]] = {
    "attention, head 64": _attention(64),
    "attention, head 128": _attention(128),
    "attention, documents": _packed_attention,
    "attention, window 128": _masked_attention(128, has_sinks=False),
    "attention, window 128, sinks": _masked_attention(128, has_sinks=True),
    "attention, sinks": _masked_attention(None, has_sinks=True),
    "linear and cross-entropy": _linear_cross_entropy,
    "RMSNorm": _rms_norm,
    "residual and RMSNorm": _add_rms_norm,
    "SwiGLU": _swiglu,
    "GEGLU, tanh": _geglu("geglu_tanh"),
    "rope": _rope,
    "grouped linear": _grouped_linear,
    "permute and unpermute": _permute,
    "AdamW": _adamw,
    "gradient norm": _grad_norm,
    "LayerNorm": _layer_norm,
    "residual and LayerNorm": _add_layer_norm,
    "GEGLU, exact": _geglu("geglu"),
    "GEGLU, quick": _geglu("quick_geglu"),
    "AdamW, bf16 states": _adamw_bf16,
    "Lion": _lion,
    "attention, soft cap": _capped_attention,
    **FLOAT8_KERNELS,
}


def measure(name: str, setting: Setting) -> dict[str, Any]:
    """Return for each form its milliseconds, rate, and relative error of all results against the first form's.

    With `setting.ahead` each form only runs once.
    """
    torch.manual_seed(0)
    kernel = KERNELS[name](Inputs(setting))
    expected: list[Tensor] | None = None
    upstream: list[Tensor] = []
    found: dict[str, Any] = {}
    for form, function in kernel.forms.items():
        inputs = _copies(kernel.inputs)  # Liger writes gradients into what it got
        try:
            if not upstream and kernel.backward:
                upstream = [torch.randn_like(one) for one in _outputs(function, inputs)]
            run = partial(_run, function, inputs, _copies(upstream))
            results = run()
            if setting.ahead:  # compiled
                continue
            expected = results if expected is None else expected
            error = max((relative_error(*both) for both in zip(results, expected, strict=True)), default=0.0)
            seconds = median_seconds(run, setting.device)
        except Exception as problem:
            found[form] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
            continue
        found[form] = {"milliseconds": 1e3 * seconds, "error": error}
        if kernel.bytes:
            found[form]["gigabytes_per_second"] = kernel.bytes / seconds / 1e9
        if kernel.flops:
            found[form]["tflops"] = kernel.flops / seconds / 1e12
    return {"forms": found, "fp8": kernel.fp8}


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves with the same values."""
    return [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors]


def _outputs(function: Form, inputs: Sequence[Tensor]) -> list[Tensor]:
    made = function(*inputs)
    return [made] if isinstance(made, Tensor) else list(made)


def _run(function: Form, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Run forward, and backward if there is an upstream gradient; return outputs and gradients."""
    outputs = _outputs(function, inputs)
    gradients = torch.autograd.grad(outputs, inputs, upstream) if upstream else ()
    return [one.detach() for one in (*outputs, *gradients)]
