"""A stand-in for Transformer Engine: linear layers, norms, `autocast` and recipes with the signatures of 2.9, on CPUs.

It computes in the dtype of its inputs, or with `quantize` in emulated fp8 by this project's own matmuls. It holds its
callers to what Transformer Engine documents or asserts: an autocast, contiguous input whose rows can be cast, weights
of the rank's shape, one backward for a forward. As Transformer Engine, it computes with the weights of the last pass
that was said to be the first of its step, and its layers keep histories for delayed scaling.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from te_delayed_scaling import BACKWARD, FORWARD, TENSORS, Manager, Scales, Tensors, cast_weight
from torch import Tensor, nn

from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.kernels.linear_matmuls import COMPUTE_DTYPE
from megalaunch.kernels.rms_norm import rms_norm
from megalaunch.schema.precision import Float8Spec


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    name, alignment = "delayed", 16

    def largest(self, is_forward: bool) -> float:
        is_e5m2 = self.fp8_format is Format.HYBRID and not is_forward
        return torch.finfo(torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn).max


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    name, alignment = "tensorwise", 16


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    name, alignment = "blockwise", 16


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
    name, alignment = "mxfp8", 32


@dataclass
class State:
    """What the stand-in is asked for, and how it computes; `saves_8_bits`: forward only, for what backward keeps."""

    recipe: Any = None
    quantize: bool = False
    saves_8_bits: bool = False
    layers: list[Linear] = field(default_factory=list)
    experts: list[GroupedLinear] = field(default_factory=list)
    normed: int = 0
    casts: int = 0
    manager: Manager = field(default_factory=Manager)


STATE = State()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    manager = STATE.manager
    before = STATE.recipe, manager.group, manager.is_first
    STATE.recipe, manager.group = recipe if enabled else None, amax_reduction_group
    manager.is_first |= manager.depth == 0
    manager.depth += 1
    try:
        yield
    finally:
        STATE.recipe, manager.group, manager.is_first = before
        manager.depth -= 1
        if enabled and manager.depth == 0 and torch.is_grad_enabled():
            manager.make_entries(FORWARD)


class _Module(nn.Module):
    """With the state of delayed scaling; `weight_scales` are those of the cast weights."""

    def __init__(self) -> None:
        super().__init__()
        self.meta: dict[str, Tensors] = {}
        self.weight_scales: list[Tensor] = []

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        if STATE.recipe.name != "delayed" or self.meta:
            return
        for direction, each in TENSORS.items():
            history = torch.zeros(STATE.recipe.amax_history_len, each * num_gemms, device="cpu")
            self.meta[direction] = Tensors(torch.ones(each * num_gemms, device="cpu"), history)

    def get_fp8_meta_tensors(self) -> None:
        if not self.meta:
            return None
        return {name: [each.scale.clone(), each.amax_history.clone()] for name, each in self.meta.items()}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Any = None) -> None:
        for name, each in self.meta.items():
            each.scale.copy_(fp8_meta_tensors[name][0])
            each.amax_history.copy_(fp8_meta_tensors[name][1])

    def prepare(self, weights: list[Tensor], casts: bool) -> list[Any]:
        """Return the matmuls of a call, one for each weight; `casts`: it casts the weights."""
        self.init_fp8_metadata(num_gemms=len(weights))
        STATE.casts += casts
        if STATE.recipe.name != "delayed":
            return [_matmuls(None)] * len(weights)
        STATE.manager.register(STATE.recipe, self.meta)
        if casts:
            self.weight_scales = [cast_weight(self.meta, matmul, weight) for matmul, weight in enumerate(weights)]
        return [_matmuls(Scales(self.meta, matmul, scale)) for matmul, scale in enumerate(self.weight_scales)]


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        assert parallel_mode in (None, "column", "row")
        self.group, self.mode = tp_group, parallel_mode
        ranks = 1 if tp_group is None else tp_group.size()
        self.sequence_parallel = sequence_parallel and ranks > 1
        shards = {"column": (ranks, 1), "row": (1, ranks), None: (1, 1)}[parallel_mode]
        assert out_features % shards[0] == 0
        assert in_features % shards[1] == 0
        shape = out_features // shards[0], in_features // shards[1]
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.cached: Tensor | None = None
        STATE.layers.append(self)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        assert STATE.recipe is not None, "outside of an autocast"
        assert inp.is_contiguous()
        assert inp[..., 0].numel() % 8 == 0, "FP8 execution requires rows divisible by 8"
        weight = self.weight
        assert not weight.is_meta
        assert weight.dtype == inp.dtype
        assert inp.shape[-1] == weight.shape[-1]
        if is_first_microbatch is None or is_first_microbatch:
            self.cached = _cast(weight)
        (matmuls,) = self.prepare([weight], is_first_microbatch in (None, True))
        return _LinearFn.apply(inp, weight, self, matmuls)


class LayerNormLinear(Linear):
    """The norm of the rank's rows, then the linear layer, which gathers what is normed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            bias=bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )
        norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization](
            in_features, eps, zero_centered_gamma, device, params_dtype
        )
        self.layer_norm_weight = norm.weight
        if norm.bias is not None:
            self.layer_norm_bias = norm.bias
        self.eps, self.offset = eps, float(zero_centered_gamma)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        assert inp.is_contiguous()
        normed = _normalize(inp, self.layer_norm_weight, getattr(self, "layer_norm_bias", None), self.offset, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        assert not bias
        assert tp_group is None, "no current scaling with tensor parallelism"
        self.shape = num_gemms, out_features, in_features
        for expert in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{expert}", nn.Parameter(weight))
        self.cached: list[Tensor] = []
        STATE.experts.append(self)

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        assert STATE.recipe is not None, "outside of an autocast"
        assert inp.is_contiguous()
        experts, out_features, in_features = self.shape
        assert isinstance(m_splits, list), "2.9 takes no tensor"
        assert len(m_splits) == experts
        assert sum(m_splits) == inp.shape[0]
        assert all(rows % STATE.recipe.alignment == 0 for rows in m_splits), "fp8_padding has not padded the rows"
        weights = [getattr(self, f"weight{expert}") for expert in range(experts)]
        for weight in weights:
            assert (weight.dtype, weight.shape) == (inp.dtype, (out_features, in_features))
        if is_first_microbatch is None or is_first_microbatch:
            self.cached = [_cast(weight) for weight in weights]
        matmuls = self.prepare(weights, is_first_microbatch in (None, True))
        return _GroupedLinearFn.apply(inp, m_splits, self.cached, matmuls, *weights)


class RMSNorm(nn.Module):
    """By this project's own norm; statistics and 1 + weight are fp32, as in Transformer Engine."""

    has_bias = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if self.has_bias else None

    def forward(self, input: Tensor) -> Tensor:
        return _normalize(input, self.weight, self.bias, self.offset, self.eps)


class LayerNorm(RMSNorm):
    has_bias = True


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float) -> Tensor:
    assert not weight.is_meta
    assert weight.dtype == x.dtype
    STATE.normed += 1
    weight = weight.float() + offset
    if bias is None:
        return rms_norm(x, weight, eps)
    return F.layer_norm(x.float(), weight.shape, weight, bias.float(), eps).to(x.dtype)


class _GroupedLinearFn(torch.autograd.Function):
    """One product for each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], cached: list[Tensor], matmuls: Any, *weights: Tensor) -> Tensor:
        ctx.splits, ctx.cached, ctx.matmuls, ctx.done = splits, cached, matmuls, False
        ctx.is_first = STATE.manager.take_first()
        _save(ctx, x, *weights)
        each = zip(matmuls, x.split(splits), cached, strict=True)
        return torch.cat([one.matmuls.output(rows, weight) for one, rows, weight in each])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        assert not ctx.done, "a second backward of one forward"
        ctx.done = True
        x, *weights = ctx.saved_tensors
        for weight, cast in zip(weights, ctx.cached, strict=True):
            assert torch.equal(weight, cast), "the weight changed, or its memory was freed"
        parts = zip(ctx.matmuls, dy.contiguous().split(ctx.splits), x.split(ctx.splits), ctx.cached, strict=True)
        grads = [one.gradients(*rest) for one, *rest in parts]
        _end_backward(ctx)
        return torch.cat([dx for dx, _ in grads]), None, None, None, *(dweight for _, dweight in grads)


@dataclass
class _Matmuls:
    """The matmuls of one weight in a call, with its scales by delayed scaling."""

    matmuls: Any
    scales: Scales | None

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of input and weight."""
        if self.scales is not None:
            self.scales.is_backward = True
        grad = self.matmuls.prepare(dy, both=True)
        return self.matmuls.input_grad(grad, weight), self.matmuls.weight_grad(grad, x.flatten(0, -2))


def _matmuls(scales: Scales | None) -> _Matmuls:
    if not STATE.quantize:
        return _Matmuls(COMPUTE_DTYPE, None)
    spec = Float8Spec(recipe=STATE.recipe.name, format=STATE.recipe.fp8_format.value)
    return _Matmuls(Float8Matmuls(spec, True, lambda dims, amax: amax, scales), scales)


def _end_backward(ctx: Any) -> None:
    if ctx.is_first:
        STATE.manager.make_entries(BACKWARD)


def _cast(weight: Tensor) -> Tensor:
    return weight.detach() if STATE.saves_8_bits else weight.detach().clone()


def _save(ctx: Any, x: Tensor, *weights: Tensor) -> None:
    """Save for backward; as Transformer Engine does, the input in 8 bits, and of weights nothing new."""
    if STATE.saves_8_bits:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn))
    else:
        ctx.save_for_backward(x, *weights)


class _LinearFn(torch.autograd.Function):
    """Column: gather x, multiply. Row: multiply, sum. Collectives are along the first dim with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear, matmuls: Any) -> Tensor:
        ctx.layer, ctx.matmuls, ctx.cached, ctx.done = layer, matmuls, layer.cached, False
        ctx.is_first = STATE.manager.take_first()
        _save(ctx, x, weight)
        whole = _gather(x, layer.group) if layer.mode == "column" and layer.sequence_parallel else x
        y = matmuls.matmuls.output(whole, layer.cached)
        return _sum(y, layer) if layer.mode == "row" else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        assert not ctx.done, "a second backward of one forward"
        ctx.done = True
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        assert torch.equal(weight, ctx.cached), "the weight changed, or its memory was freed"
        if layer.mode == "column" and layer.sequence_parallel:
            x = _gather(x, layer.group)
        if layer.mode == "row" and layer.sequence_parallel:
            dy = _gather(dy, layer.group)
        dx, dweight = ctx.matmuls.gradients(dy, x, ctx.cached)
        _end_backward(ctx)
        return _sum(dx, layer) if layer.mode == "column" else dx, dweight, None, None


def _gather(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _sum(x: Tensor, layer: Linear) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=layer.group)
    return total.chunk(layer.group.size())[layer.group.rank()].contiguous() if layer.sequence_parallel else total


def transformer_engine_modules() -> dict[str, ModuleType]:
    """Return the modules, by the names under which they are imported."""
    library, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipes = ModuleType("transformer_engine.common"), ModuleType("transformer_engine.common.recipe")
    for each in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, autocast):
        setattr(layers, each.__name__, each)
    for each in (Format, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        setattr(recipes, each.__name__, each)
    library.pytorch, library.common, common.recipe = layers, common, recipes
    return {module.__name__: module for module in (library, layers, common, recipes)}
