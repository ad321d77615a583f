"""How a module of a library user's own has a parameter initialized, where the decoder's rule is not the right one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParamInit:
    """Normal numbers with this mean and standard deviation; a std of 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0


def declared_inits(model: nn.Module) -> Mapping[str, ParamInit]:
    """Return the `<parameter>_init` that modules declare, by the parameter's name in the model."""
    found = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            declared = getattr(module, f"{name}_init", None)
            if isinstance(declared, ParamInit):
                found[f"{prefix}.{name}" if prefix else name] = declared
    return found
