"""Bytes of a parameter in each of its dtypes, and of all states in a phase of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megalaunch.plan.memory.dtypes_and_groups import dtype_bytes
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2})
"""Bytes of a number, by the dtypes of states."""


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes on one device in one phase of a step, without optimizer states and activations."""

    weights: float
    gradients: float
    buffers: float = 0.0


def main_param_bytes(spec: RunSpec) -> int:
    """Return the bytes of a main parameter (master weight)."""
    return DTYPE_BYTES[spec.precision.main_params_dtype]


def moment_bytes(spec: RunSpec) -> int:
    """Return the bytes of a number of an optimizer state."""
    return DTYPE_BYTES[spec.precision.exp_avg_dtype]


@dataclass(frozen=True)
class ParamBytes:
    """Bytes per parameter: compute copy, main parameter, accumulated gradient, gradient while it is reduced."""

    compute: int
    main: int
    grad: int
    reduced: int

    @classmethod
    def from_spec(cls, spec: RunSpec, topology: Topology) -> ParamBytes:
        """Return those of a resolved spec; a single data-parallel rank reduces no gradients."""
        precision = spec.precision
        grad = DTYPE_BYTES[precision.grad_dtype]
        reduces = topology.dp * topology.cp > 1
        return cls(
            compute=dtype_bytes(precision.compute_dtype),
            main=main_param_bytes(spec),
            grad=grad,
            reduced=DTYPE_BYTES[precision.grad_reduce_dtype] if reduces else grad,
        )
