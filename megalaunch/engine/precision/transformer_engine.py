"""Transformer Engine (github.com/NVIDIA/TransformerEngine): what is called of its public interface, and its recipes.

`parallel/transformer_engine.py` has the layers, `transformer_engine_histories.py` the state of delayed scaling.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalaunch.platform.package_interface import missing_names
from megalaunch.schema.precision import Float8Spec

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
"""The directions of a layer's scales and histories, as Transformer Engine calls them."""

_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""The names of the recipes in `transformer_engine.common.recipe`."""

_NORMS = ("RMSNorm", "LayerNorm")

_LINEAR = (
    *("in_features", "out_features", "bias", "params_dtype", "device"),
    *("tp_group", "parallel_mode", "sequence_parallel"),
)

_HISTORIES = {
    "init_fp8_metadata": ("num_gemms",),
    "get_fp8_meta_tensors": (),
    "reset_fp8_meta_tensors": ("fp8_meta_tensors",),
}

_BOUND: dict[str, tuple[str, ...]] = {
    "pytorch.Linear": _LINEAR,
    "pytorch.Linear.forward": ("inp", "is_first_microbatch"),
    "pytorch.LayerNormLinear": (*_LINEAR, "eps", "normalization", "zero_centered_gamma"),
    "pytorch.LayerNormLinear.forward": ("inp", "is_first_microbatch"),
    "pytorch.GroupedLinear": ("num_gemms", "in_features", "out_features", "bias", "params_dtype", "device"),
    "pytorch.GroupedLinear.forward": ("inp", "m_splits", "is_first_microbatch"),
    **{f"pytorch.{name}": ("normalized_shape", "eps", "zero_centered_gamma", "device", "dtype") for name in _NORMS},
    **{
        f"pytorch.{layer}.{name}": arguments
        for layer in ("Linear", "LayerNormLinear", "GroupedLinear")
        for name, arguments in _HISTORIES.items()
    },
    "pytorch.autocast": ("enabled", "recipe", "amax_reduction_group"),
    **{f"common.recipe.{name}": ("fp8_format",) for name in _RECIPES.values()},
    "common.recipe.DelayedScaling": ("fp8_format", "margin", "amax_history_len"),
    "common.recipe.Format.E4M3": (),
    "common.recipe.Format.HYBRID": (),
}
"""What is called of `transformer_engine`, with the arguments that it is given."""

_BOUND_IN_ATTENTION = {
    "common.recipe.DelayedScaling": ("fp8_dpa",),
    **{f"pytorch.DotProductAttention.{name}": arguments for name, arguments in _HISTORIES.items()},
}
"""The same of attention in fp8."""


class UnknownTransformerEngine(RuntimeError):
    """The installed Transformer Engine cannot be imported, or lacks functions or arguments that are called."""


@dataclass(frozen=True)
class TransformerEngine:
    """What is called of Transformer Engine.

    Attributes:
        linear: The class `pytorch.Linear`.
        norm_linear: The class `pytorch.LayerNormLinear`, a linear layer with the norm of its input.
        grouped_linear: The class `pytorch.GroupedLinear`.
        rms_norm, layer_norm: The classes `pytorch.RMSNorm` and `pytorch.LayerNorm`.
        autocast: `pytorch.autocast`, the context in which layers compute by a recipe.
        recipes: The module `common.recipe`.
    """

    linear: Callable[..., nn.Module]
    norm_linear: Callable[..., nn.Module]
    grouped_linear: Callable[..., nn.Module]
    rms_norm: Callable[..., nn.Module]
    layer_norm: Callable[..., nn.Module]
    autocast: Callable[..., AbstractContextManager[Any]]
    recipes: Any

    def make_recipe(self, settings: Float8Spec) -> Any:
        """Return the recipe of the settings. Raises KeyError if Transformer Engine has none like it."""
        number_format = self.recipes.Format.HYBRID if settings.format == "hybrid" else self.recipes.Format.E4M3
        recipe, values = getattr(self.recipes, _RECIPES[settings.recipe]), dict[str, Any]()
        if settings.recipe == "delayed":
            values = {"margin": settings.margin, "amax_history_len": settings.amax_history_len}
        if settings.dot_product_attention:
            values["fp8_dpa"] = True
        return recipe(fp8_format=number_format, **values)


class Autocast:
    """The contexts of Transformer Engine in which the layers of a decoder compute.

    With most recipes each layer has a context of its own. Delayed scaling makes an entry in all histories where the
    outermost context ends, and another one for gradients where the backward pass of the first layer in it ends. There
    one context spans a forward pass of the decoder. None is within it: the layer after an inner one would be a first
    layer too.

    What is recomputed in a backward pass has the scales of its forward pass, and leaves the histories as they are.
    (`pytorch.checkpoint` would make an entry in all of them for each function that is recomputed, and has no early
    stop.)

    Args:
        library: Transformer Engine.
        settings: The recipe.
        group: The ranks over which delayed scaling reduces amaxes; None: with another recipe.
        enabled: Whether layers compute by the recipe in them.

    Attributes:
        has_passed: Layers have computed without gradients: delayed scaling noted amaxes, and made no entry of them.
    """

    def __init__(
        self,
        library: TransformerEngine,
        settings: Float8Spec,
        group: ProcessGroup | None = None,
        enabled: bool = True,
    ) -> None:
        self._library, self._recipe, self._group = library, library.make_recipe(settings), group
        self._enabled = enabled
        self._pass: AbstractContextManager[Any] | None = None
        self._noted: list[tuple[Any, Tensor]] | None = None
        self.has_passed = False

    def begin_pass(self, *args: Any) -> None:
        """Begin a forward pass, as a hook of the decoder."""
        self._pass = self._enter()
        self._pass.__enter__()

    def end_pass(self, *args: Any) -> None:
        """End a forward pass, as a hook of the decoder; also if it failed."""
        if self._pass is not None:
            ended, self._pass = self._pass, None
            ended.__exit__(None, None, None)

    def of_layer(self, layer: Any) -> AbstractContextManager[Any]:
        """Return the context for a call of a layer."""
        self.has_passed |= not torch.is_grad_enabled()
        self.note_scales(layer)
        return self._enter() if self._pass is None else nullcontext()

    def note_scales(self, layer: Any) -> None:
        """Note the scales with which a layer is about to compute, if it will be recomputed."""
        if self._noted is not None and torch.is_grad_enabled():
            self._noted.append((layer, layer.get_fp8_meta_tensors()[FORWARD][0]))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for the forward pass of a checkpointed function, and one for its recomputation."""
        noted: list[tuple[Any, Tensor]] = []
        return self._noting(noted), self._recomputing(noted)

    @contextmanager
    def _noting(self, noted: list[tuple[Any, Tensor]]) -> Iterator[None]:
        self._noted, before = noted, self._noted
        try:
            yield
        finally:
            self._noted = before

    @contextmanager
    def _recomputing(self, noted: list[tuple[Any, Tensor]]) -> Iterator[None]:
        kept = [(layer, layer.get_fp8_meta_tensors()) for layer, _ in noted]
        for (layer, scale), (_, now) in zip(noted, kept, strict=True):
            layer.reset_fp8_meta_tensors({FORWARD: (scale, now[FORWARD][1]), BACKWARD: now[BACKWARD]})
        try:
            # An outermost context that is enabled would make an entry where it ends.
            with self._library.autocast(enabled=False), self._enter():
                yield
        finally:
            for layer, now in kept:
                layer.reset_fp8_meta_tensors(now)

    def _enter(self) -> AbstractContextManager[Any]:
        return self._library.autocast(enabled=self._enabled, recipe=self._recipe, amax_reduction_group=self._group)


def load_transformer_engine(float8_attention: bool = False) -> TransformerEngine:
    """Import Transformer Engine and compare its signatures with what is called; `float8_attention`: for this, too.

    Raises:
        UnknownTransformerEngine: The import failed, or something is missing; the message names all of it.
    """
    try:
        layers = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
    except Exception as error:  # whatever a missing library of CUDA, or another torch than it was built for, raises
        raise UnknownTransformerEngine(
            f"transformer_engine cannot be imported ({type(error).__name__}: {error}); "
            "install one that was built for this torch, or set precision.fp8.implementation=native"
        ) from error
    asked = [(_BOUND, "precision.fp8.implementation=native")]
    if float8_attention:
        asked.append((_BOUND_IN_ATTENTION, "precision.fp8.dot_product_attention=false"))
    for bound, without in asked:
        if missing := missing_names({"pytorch": layers, "common.recipe": recipes}, bound):
            raise UnknownTransformerEngine(
                f"the installed transformer_engine has no {', '.join(missing)}; "
                f"install another version of it, or set {without}"
            )
    classes = layers.Linear, layers.LayerNormLinear, layers.GroupedLinear, layers.RMSNorm, layers.LayerNorm
    return TransformerEngine(*classes, layers.autocast, recipes)
