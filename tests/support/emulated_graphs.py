"""A platform of the CPU that captures graphs: operators are recorded, and replayed on the same tensors.

It refuses what a GPU cannot capture: values that are read on the host, and tensors that are made from the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalaunch.engine.platform.cpu import CpuPlatform
from megalaunch.engine.platform.platform import CapturedGraph
from megalaunch.platform.platforms import PlatformFacts

_ON_THE_HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select")


class EmulatedGraphs(CpuPlatform):
    """The CPU, with emulated graphs. `captured` counts them, and `replayed` their replays."""

    graph_class = "emulated"

    def __init__(self, facts: PlatformFacts) -> None:
        super().__init__(facts)
        self.captured = self.replayed = 0

    def capture_graph(self, function: Callable[[], Tensor]) -> CapturedGraph:
        """Record the operators of a function, and spoil their results: a GPU computes nothing while it captures."""
        with _Recorder() as recorder:
            result = function()
        self.captured += 1
        for call in recorder.calls:
            for made in call.made:
                made.fill_(torch.nan if made.is_floating_point() else 0)

        def replay() -> None:
            self.replayed += 1
            for call in recorder.calls:
                call.run()

        return CapturedGraph(replay, result)


class _Call(NamedTuple):
    """A recorded operator, and the tensors that it made."""

    operator: Any
    args: Any
    kwargs: Any
    made: list[Tensor]

    def run(self) -> None:
        """Run it again, into the memory of its first results."""
        again = _tensors(self.operator(*self.args, **self.kwargs))
        if self.made:
            for tensor, new in zip(self.made, again, strict=True):
                tensor.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _ON_THE_HOST:
            raise RuntimeError(f"{func} cannot be captured")
        out = func(*args, **kwargs)
        held = {_memory(tensor) for tensor in _tensors((args, kwargs))} - {None}
        views = [_memory(tensor) in held for tensor in _tensors(out)]  # they stay views of the same memory
        assert all(views) or not any(views), f"{func} returns views and new tensors"
        self.calls.append(_Call(func, args, kwargs, [] if any(views) else _tensors(out)))
        return out


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a weight that oneDNN holds in a layout of its own."""
    return None if tensor.layout is torch._mkldnn else tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
