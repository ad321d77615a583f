"""Small inputs of everything that a package may override, each with what computes it in plain torch.

The check (operator_check.py) compares values and gradients on a device with those of the reference in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalaunch.engine.model.attention.attention import Attention, SelfAttention
from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.attention.latent_attention import LatentAttention
from megalaunch.engine.model.config import (
    AttentionConfig,
    LatentConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.experts import Experts
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.moe.routing import score_experts, top_k_stable
from megalaunch.engine.model.rope import RopeCache, apply_rope, rope_cos_sin
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.engine.optimizer.muon import orthogonalize
from megalaunch.engine.optimizer.update_rules import AdamW, ParameterState, Update
from megalaunch.kernels.add_norm import add_norm, add_norm_reference
from megalaunch.kernels.causal_attention import causal_sdpa, causal_sdpa_reference, masked_sdpa, masked_sdpa_reference
from megalaunch.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from megalaunch.kernels.forms import KernelForms
from megalaunch.kernels.geglu import geglu_reference
from megalaunch.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from megalaunch.kernels.overridable import target_name
from megalaunch.kernels.rms_norm import rms_norm, rms_norm_reference
from megalaunch.kernels.swiglu import swiglu, swiglu_reference
from megalaunch.schema.model import GATED, Activation
from megalaunch.schema.moe import RouterDtype
from megalaunch.schema.optimizer import OptimizerSpec

Outputs = Tensor | tuple[Tensor, ...]
PLAIN_TORCH = KernelForms(
    on_cpu=False,
    rms_norm=rms_norm_reference,
    attention=lambda q, k, v, mask: (
        causal_sdpa_reference(q, k, v, None) if mask is None else masked_sdpa_reference(q, k, v, mask, None)
    ),
    swiglu=swiglu_reference,
    geglu=geglu_reference,
)
"""The forms in which the reference of a module is computed, in fp64."""

_HIDDEN, _TOKENS, _HEADS, _GROUPS, _WIDTH, _EXPERTS = 64, 33, 4, 2, 96, 3
_ENDS = torch.tensor([5, 5, 12], dtype=torch.int32)  # of the rows of each expert: the second has none
_NORM = NormConfig(1e-5)
_ATTENTION = AttentionConfig(num_heads=_HEADS, num_groups=_GROUPS, head_dim=16, softmax_scale=0.25)
_LATENT = AttentionConfig(
    num_heads=_HEADS,
    num_groups=_HEADS,
    head_dim=24,
    softmax_scale=24**-0.5,
    latent=LatentConfig(
        norm_epsilon=1e-6, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
    ),
)


@dataclass(frozen=True)
class Case:
    """What is overridden, and how to call it.

    Attributes:
        target: The function, method or class.
        call: Called with the module (None: there is none), the inputs and `others`.
        reference: As `call`, in plain torch.
        shapes: Of the differentiable inputs, drawn from a normal distribution.
        others: Further inputs; tensors are moved to the device, floating ones have the dtype of the inputs.
        module: Builds the module on meta; None: a function.
        differentiable: Whether the outputs have gradients.
        always: Whether it is checked also where nothing replaces it: a part of another case need not be.
        variant: Settings of the module that change what it computes, where it has several cases.
    """

    target: Callable[..., Any]
    call: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    shapes: Sequence[tuple[int, ...]]
    others: tuple[object, ...] = ()
    module: Callable[[torch.dtype], nn.Module] | None = None
    differentiable: bool = True
    always: bool = True
    variant: str = ""

    @property
    def name(self) -> str:
        """The target's name below megalaunch."""
        return target_name(self.target)

    @property
    def label(self) -> str:
        """The name, with the variant."""
        return f"{self.name} ({self.variant})" if self.variant else self.name


def _function(
    target: Callable[..., Outputs],
    reference: Callable[..., Outputs] | None,
    shapes: Sequence[tuple[int, ...]],
    *others: object,
    differentiable: bool = True,
) -> Case:
    """Return the case of a function; without a reference it is its own, as `PLAIN_TORCH` excludes its overrides."""
    plain = _without_module(target if reference is None else reference)
    return Case(target, _without_module(target), plain, shapes, others, differentiable=differentiable)


def _without_module(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    return lambda _, *inputs: function(*inputs)


def _module(
    target: Callable[..., Any],
    build: Callable[[torch.dtype], nn.Module],
    call: Callable[..., Outputs],
    *shapes: tuple[int, ...],
    others: tuple[object, ...] = (),
    variant: str = "",
) -> Case:
    always = isinstance(target, type) and not variant
    return Case(target, call, call, shapes, others, build, always=always, variant=variant)


def _attend(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attended: Tensor = module(x, RopeCache(cos, sin), causal_attention)
    return attended


def _core(module: nn.Module, *heads: Tensor) -> Tensor:
    attention: Any = module
    attended: Tensor = attention.core_attention(causal_attention, *heads)
    return attended


def _route(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    routing = module(x, 1)
    return routing.weights_Tk, routing.expert_ids_Tk


def _rotation(width: int) -> tuple[Tensor, ...]:
    cache = rope_cos_sin(torch.arange(_TOKENS), RopeConfig(theta=1e4, rotary_dim=width), torch.float64)
    return cache.cos, cache.sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rope(x, RopeCache(cos, sin))


def _router(dtype: torch.dtype) -> nn.Module:
    wide: RouterDtype = "fp64" if dtype == torch.float64 else "fp32"
    config = MoEConfig(num_experts=8, top_k=2, expert=MLPConfig(width=_WIDTH), router_dtype=wide)
    return Router(_HIDDEN, config)


def _activate(module: nn.Module, *entered: Tensor) -> Tensor:
    block: Any = module
    activated: Tensor = block.activation(*entered)
    return activated


def _call(module: nn.Module, *inputs: Tensor) -> Tensor:
    output: Tensor = module(*inputs)
    return output


def _add_norms() -> Iterator[Case]:
    """Yield the cases of the residual addition with RMSNorm and with LayerNorm."""
    shapes = ((3, 5, 64), (3, 5, 64), (64,), (64,))
    for variant, widths in (("", shapes[:3]), ("LayerNorm", shapes)):
        call, plain = (partial(_add_norm, function) for function in (add_norm, add_norm_reference))
        yield Case(add_norm, call, plain, widths, variant=variant)


def _add_norm(function: Callable[..., Outputs], _: None, x: Tensor, update: Tensor, *scale: Tensor) -> Outputs:
    weight, bias = scale if len(scale) == 2 else (*scale, None)
    return function(x, update, weight, bias, 1e-5, x.dtype)


def _norms(target: Callable[..., Any]) -> Iterator[Case]:
    """Yield the cases of a norm: an override has to mind each of these settings."""
    layer, zero_centered = replace(_NORM, layer=True), replace(_NORM, zero_centered_gamma=True)
    for variant, config in (("", _NORM), ("LayerNorm", layer), ("zero-centered", zero_centered)):
        yield _module(target, partial(_build_norm, config), _call, _X, variant=variant)


def _build_norm(config: NormConfig, _: torch.dtype) -> nn.Module:
    return Norm(_HIDDEN, config)


def _mlps(target: Callable[..., Any], call: Callable[..., Outputs], whole: bool) -> Iterator[Case]:
    """Yield the cases of an MLP, or of its activation alone: gated or not, it depends on model.activation."""
    kinds: tuple[Activation, ...] = ("swiglu", "geglu", "gelu")
    for name in kinds:
        shapes = (_X,) if whole or name not in GATED else (_X, _X)
        build = partial(_build_mlp, MLPConfig(width=_WIDTH, activation=name))
        yield _module(target, build, call, *shapes, variant="" if name == "swiglu" else name)


def _build_mlp(config: MLPConfig, _: torch.dtype) -> nn.Module:
    return MLP(_HIDDEN, config)


def _update(parameter: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Return the parameter and its moments after three updates."""
    rule = AdamW(OptimizerSpec(epsilon=1e-5))
    weight, wide = parameter.detach().clone(), gradients[0].dtype
    moments = {name: torch.zeros_like(weight, dtype=wide) for name in rule.state_names}
    state = ParameterState(moments, torch.zeros((), dtype=torch.float32, device=weight.device))
    for gradient in gradients:
        rule.apply(Update([weight], [gradient.detach().clone()], [state], 0.01, 0.1, 2.0))
    return weight, *moments.values()


_QKV = ((2, _HEADS, _TOKENS, 16), (2, _GROUPS, _TOKENS, 16), (2, _GROUPS, _TOKENS, 16))
_X = (2, _TOKENS, _HIDDEN)
_MASK = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril() & ~torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril(-9)


CASES: tuple[Case, ...] = (
    *_add_norms(),
    _function(rms_norm, rms_norm_reference, ((3, 5, 64), (64,)), 1e-5),
    _function(swiglu, swiglu_reference, ((3, 5, 64), (3, 5, 64))),
    _function(causal_sdpa, causal_sdpa_reference, _QKV, None),
    _function(masked_sdpa, masked_sdpa_reference, _QKV, _MASK, None),
    _function(cross_entropy, cross_entropy_reference, ((12, 50),), torch.arange(12) * 3, 6),
    _function(grouped_linear, grouped_linear_reference, ((12, 16), (_EXPERTS, 8, 16)), _ENDS),
    Case(apply_rope, _without_module(_rotate), _without_module(_rotate), ((2, _HEADS, _TOKENS, 16),), _rotation(16)),
    _function(score_experts, None, ((12, 8),), "sigmoid"),
    _function(top_k_stable, None, ((12, 8),), 2, differentiable=False),
    _function(orthogonalize, None, ((24, 16),), 2, differentiable=False),
    *_norms(Norm),
    *_norms(Norm.normalize),
    _module(Attention, lambda _: Attention(_HIDDEN, _ATTENTION, _NORM), _attend, _X, others=_rotation(16)),
    _module(
        Attention,
        lambda _: Attention(_HIDDEN, replace(_ATTENTION, output_gate=True), _NORM),
        _attend,
        _X,
        others=_rotation(16),
        variant="output gate",
    ),
    _module(SelfAttention.core_attention, lambda _: SelfAttention(_ATTENTION, NO_TP), _core, *_QKV),
    _module(LatentAttention, lambda _: LatentAttention(_HIDDEN, _LATENT, _NORM), _attend, _X, others=_rotation(8)),
    *_mlps(MLP, _call, whole=True),
    *_mlps(MLP.activation, _activate, whole=False),
    _module(Router, _router, _route, (12, _HIDDEN)),
    _module(
        Experts,
        lambda _: Experts(_EXPERTS, _HIDDEN, MLPConfig(width=_WIDTH)),
        _call,
        (12, _HIDDEN),
        others=(_ENDS,),
    ),
    _module(Experts.activation, lambda _: Experts(_EXPERTS, _HIDDEN, MLPConfig(width=_WIDTH)), _activate, _X, _X),
    Case(AdamW, _without_module(_update), _without_module(_update), ((8, 16),) * 4, differentiable=False),
)
"""Everything in `OVERRIDABLE`, and operators of megalaunch's own."""
