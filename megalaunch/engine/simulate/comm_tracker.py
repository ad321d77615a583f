"""Record the collectives of a step, simulated or real: kind, group, phase, count and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from megalaunch.engine.parallel.step_observer import Phase
from megalaunch.engine.simulate.phase_tracker import PhaseTracker
from megalaunch.engine.torch_private import TorchDispatchMode, operator_schema, ranks_of_group, tree_leaves

# The kind of each operator of torch's two namespaces of collectives.
_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}
_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class CommKind:
    """A kind of collective call: its phase, the collective, and the ranks of its group."""

    phase: Phase
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CommVolume:
    """`count` calls of one kind; `bytes` is the larger of input and output of a call, summed over the calls."""

    call: CommKind
    count: int
    bytes: int


class CommTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts collectives and their bytes while it is active, except in groups of one rank."""

    def __init__(self, phases: PhaseTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phases = phases
        self._counts: Counter[CommKind] = Counter()
        self._bytes: Counter[CommKind] = Counter()

    @property
    def traffic(self) -> list[CommVolume]:
        """The volume of each kind of call so far, in the order of first calls."""
        return [CommVolume(call, count, self._bytes[call]) for call, count in self._counts.items()]

    def clear(self) -> None:
        """Reset all counts."""
        self._counts.clear()
        self._bytes.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        self.after_operator(function, args, output)
        return output

    def after_operator(self, function: Any, args: tuple[Any, ...], output: Any) -> None:
        """Count an operator if it is a collective; for those who run it in a dispatch mode of their own."""
        kind = collective_kind(function)
        if kind is None:
            return
        ranks = _ranks(function, args)
        if len(ranks) > 1:
            call = CommKind(self._phase(kind, args), kind, ranks)
            self._counts[call] += 1
            self._bytes[call] += _largest(function, args, output)

    def _phase(self, kind: str, args: tuple[Any, ...]) -> Phase:
        if kind in ("send", "receive") and self._phases.phase != "preparing":
            return self._phases.p2p_phase(args[0][0])
        return self._phases.phase


@cache
def collective_kind(function: Any) -> str | None:
    """Return the collective that an operator runs, such as "all-gather"; None if it is no collective."""
    if function.namespace not in _NAMESPACES:
        return None
    return _KINDS.get(operator_schema(function).name.partition("::")[2])


def _ranks(function: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the global ranks of the process group in an operator's arguments."""
    for argument, value in zip(operator_schema(function).arguments, args, strict=False):
        if argument.name in ("process_group", "group_name"):
            return ranks_of_group(value)
    raise AssertionError(f"{function} names no process group")


def _largest(function: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes of the largest input or output; outputs are arguments (c10d) or returned (functional)."""
    sides = [_bytes(tree_leaves(value)) for value in args]
    if function.namespace == "_c10d_functional":
        sides.append(_bytes(tree_leaves(output)))
    return max(sides)


def _bytes(leaves: list[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
