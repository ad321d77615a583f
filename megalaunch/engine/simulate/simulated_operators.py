"""The dispatch mode of a simulated step: answer what fake tensors cannot, and tell the trackers of each operator."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from megalaunch.engine.simulate.comm_tracker import CommTracker
from megalaunch.engine.simulate.grad_sums import GradSums
from megalaunch.engine.simulate.memory_tracker import MemoryTracker
from megalaunch.engine.torch_private import (
    READ_DEVICE,
    READ_SCALAR,
    WAIT_COLLECTIVE,
    TorchDispatchMode,
    device_of_fake,
)


class SimulatedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode above the fake tensors' own, and the only one: each mode is asked about every operator.

    `.item()` returns 0: token counts, loss, gradient norm and error flags of fake tensors. The device of a fake tensor,
    for which torch asks more often than it runs operators, is returned without the mode below. A collective that is
    waited for is the tensor that was in flight.
    """

    def __init__(self, collectives: CommTracker, memory: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collectives, self._memory, self._grad_sums = collectives, memory, GradSums()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again, with its local tensors
        self._memory.before_operator()
        if function is READ_DEVICE:
            return device_of_fake(args[0])
        if function is WAIT_COLLECTIVE:
            return args[0]
        if self._grad_sums.is_in_place(function, args):
            return args[0].add_(args[1])
        output = 0 if function is READ_SCALAR else function(*args, **(kwargs or {}))
        self._collectives.after_operator(function, args, output)
        self._memory.after_operator(function, args, output)
        return output
