"""A stand-in for Transformer Engine: `Linear`, `autocast` and recipes with the published signatures, on CPUs over gloo.

It computes in the dtype of its inputs, or with `quantize` in emulated fp8 by this project's own matmuls. It holds its
callers to what Transformer Engine documents or asserts: an autocast, contiguous input whose rows can be cast, weights
of the rank's shape, one backward for a forward. As Transformer Engine, it computes with the weights of the last pass
that was said to be the first of its step.
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
from torch import Tensor, nn

from megalaunch.engine.precision.float8 import Float8Matmuls
from megalaunch.kernels.linear_matmuls import COMPUTE_DTYPE
from megalaunch.schema.precision import Float8Spec

# The parameters of transformer_engine.pytorch.Linear and others, in the oldest version that is supported and in 2.20.2.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "Linear": (
        "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size",
        "get_rng_state_tracker", "rng_tracker_name", "init_method", "bias", "return_bias", "params_dtype",
        "parallel_mode", "parameters_split", "device", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad",
        "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name", "delay_wgrad_compute", "symmetric_ar_type",
        "save_original_input", "name",
    ),
    "Linear.forward": ("inp", "is_first_microbatch", "fp8_output", "fp8_grad"),
    "autocast": ("enabled", "calibrating", "recipe", "amax_reduction_group", "_graph"),
}  # fmt: skip


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    name = "tensorwise"


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    name = "blockwise"


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
    name = "mxfp8"


@dataclass
class State:
    """What the stand-in is asked for, and how it computes."""

    recipe: Any = None
    quantize: bool = False
    layers: list[Linear] = field(default_factory=list)
    casts: int = 0


STATE = State()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before, STATE.recipe = STATE.recipe, recipe if enabled else None
    try:
        yield
    finally:
        STATE.recipe = before


class Linear(nn.Module):
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
            self.cached = weight.detach().clone()
            STATE.casts += 1
        return _LinearFn.apply(inp, weight, self, _matmuls())


def _matmuls() -> Any:
    if not STATE.quantize:
        return COMPUTE_DTYPE
    spec = Float8Spec(recipe=STATE.recipe.name, format=STATE.recipe.fp8_format.value)
    return Float8Matmuls(spec, True, lambda dims, amax: amax, None)


class _LinearFn(torch.autograd.Function):
    """Column: gather x, multiply. Row: multiply, sum. Collectives are along the first dim with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear, matmuls: Any) -> Tensor:
        ctx.layer, ctx.matmuls, ctx.cached, ctx.done = layer, matmuls, layer.cached, False
        ctx.save_for_backward(x, weight)
        whole = _gather(x, layer.group) if layer.mode == "column" and layer.sequence_parallel else x
        y = matmuls.output(whole, layer.cached)
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
        dx = ctx.matmuls.input_grad(dy, ctx.cached)
        dweight = ctx.matmuls.weight_grad(dy.flatten(0, -2), x.flatten(0, -2))
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
    layers.Linear, layers.autocast = Linear, autocast
    for each in (Format, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        setattr(recipes, each.__name__, each)
    library.pytorch, library.common, common.recipe = layers, common, recipes
    return {module.__name__: module for module in (library, layers, common, recipes)}
