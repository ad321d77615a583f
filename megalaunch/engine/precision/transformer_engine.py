"""Transformer Engine (github.com/NVIDIA/TransformerEngine): what is called of its public interface, and its recipes.

Only recipes without a history are called: layers have no state then that a checkpoint would lack.
`parallel/transformer_engine.py` has the layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megalaunch.platform.package_interface import missing_names
from megalaunch.schema.precision import Float8Spec

_RECIPES = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
"""The names of the recipes in `transformer_engine.common.recipe`."""

_NORMS = ("RMSNorm", "LayerNorm")

_LINEAR = (
    *("in_features", "out_features", "bias", "params_dtype", "device"),
    *("tp_group", "parallel_mode", "sequence_parallel"),
)

_BOUND: dict[str, tuple[str, ...]] = {
    "pytorch.Linear": _LINEAR,
    "pytorch.Linear.forward": ("inp", "is_first_microbatch"),
    "pytorch.LayerNormLinear": (*_LINEAR, "eps", "normalization", "zero_centered_gamma"),
    "pytorch.LayerNormLinear.forward": ("inp", "is_first_microbatch"),
    "pytorch.GroupedLinear": ("num_gemms", "in_features", "out_features", "bias", "params_dtype", "device"),
    "pytorch.GroupedLinear.forward": ("inp", "m_splits", "is_first_microbatch"),
    **{f"pytorch.{name}": ("normalized_shape", "eps", "zero_centered_gamma", "device", "dtype") for name in _NORMS},
    "pytorch.autocast": ("enabled", "recipe"),
    **{f"common.recipe.{name}": ("fp8_format",) for name in _RECIPES.values()},
    "common.recipe.Format.E4M3": (),
    "common.recipe.Format.HYBRID": (),
}
"""What is called of `transformer_engine`, with the arguments that it is given."""


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
        return getattr(self.recipes, _RECIPES[settings.recipe])(fp8_format=number_format)


def load_transformer_engine() -> TransformerEngine:
    """Import Transformer Engine and compare its signatures with what is called.

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
    if missing := missing_names({"pytorch": layers, "common.recipe": recipes}, _BOUND):
        raise UnknownTransformerEngine(
            f"the installed transformer_engine has no {', '.join(missing)}; "
            "install another version of it, or set precision.fp8.implementation=native"
        )
    classes = layers.Linear, layers.LayerNormLinear, layers.GroupedLinear, layers.RMSNorm, layers.LayerNorm
    return TransformerEngine(*classes, layers.autocast, recipes)
