"""A platform of the CPU that captures graphs: operators are recorded, and replayed on the same tensors.

It refuses what a GPU cannot capture: values that are read on the host, and tensors that are made from the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalaunch.engine.platform.cpu import CpuPlatform
from megalaunch.engine.platform.platform import CapturedGraph, GraphPool
from megalaunch.engine.torch_private import FUNCTIONAL_COLLECTIVES
from megalaunch.platform.platforms import PlatformFacts

_ON_THE_HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select")


class EmulatedGraphs(CpuPlatform):
    """The CPU, with emulated graphs. `captured` counts them, and `replayed` their replays."""

    graph_class = "emulated"

    def __init__(self, facts: PlatformFacts) -> None:
        super().__init__(facts)
        self.captured = self.replayed = 0

    def make_graph_pool(self) -> GraphPool:
        """Return a pool that is no more than a name: the memory of each graph is its own."""
        return GraphPool(object(), None)

    def empty_cache(self) -> None:
        """Do nothing."""

    def capture_graph(self, function: Callable[[], Tensor], pool: GraphPool | None = None) -> CapturedGraph:
        """Record the operators of a function, and spoil their results: a GPU computes nothing while it captures."""
        with _Recorder() as recorder:
            result = function()
        self.captured += 1
        for tensor, before in recorder.changed:
            tensor.copy_(before)
        for call in recorder.calls:
            for made in call.made:
                made.fill_(torch.nan if made.is_floating_point() else 0)

        def replay() -> None:
            self.replayed += 1
            for call in recorder.calls:
                call.run()

        return CapturedGraph(replay, result)


class _Call(NamedTuple):
    """A recorded operator, and the tensors that it made.

    They are held as `Tensor.data`: autograd does not count what is written to it, since a backward pass may be captured
    later, and has its shape from now on, whatever is done to the tensor.
    """

    operator: Any
    args: Any
    kwargs: Any
    made: list[Tensor]
    addresses: list[int | None]

    def run(self) -> None:
        """Run it again, into the memory of its first results; autograd does not count what it changes."""
        read = _tensors((self.args, self.kwargs))
        assert [_memory(tensor) for tensor in read] == self.addresses, f"{self.operator} would read other memory"
        counted = tuple(tensor for tensor in read if not tensor.is_inference())
        with _unsafe_preserve_version_counter(counted):
            again = _tensors(self.operator(*self.args, **self.kwargs))
            if self.operator.namespace == "_c10d_functional":
                again = [FUNCTIONAL_COLLECTIVES.wait_tensor(tensor) for tensor in again]
        if self.made:
            for tensor, new in zip(self.made, again, strict=True):
                tensor.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.changed: list[tuple[Tensor, Tensor]] = []  # what operators write to, before the first of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _ON_THE_HOST:
            raise RuntimeError(f"{func} cannot be captured")
        if func._schema.is_mutable:
            known = {_memory(tensor) for tensor, _ in self.changed}
            for tensor in _tensors((args, kwargs)):
                if _memory(tensor) not in known and tensor.layout is torch.strided:
                    self.changed.append((tensor.data, tensor.detach().clone()))
        out = func(*args, **kwargs)
        addresses = [_memory(tensor) for tensor in _tensors((args, kwargs))]
        held = {*addresses} - {None}
        views = [_memory(tensor) in held for tensor in _tensors(out)]  # they stay views of the same memory
        assert all(views) or not any(views), f"{func} returns views and new tensors"
        made = [] if any(views) else [tensor.data for tensor in _tensors(out)]
        self.calls.append(_Call(func, args, kwargs, made, addresses))
        return out


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a weight that oneDNN holds in a layout of its own."""
    return None if tensor.layout is torch._mkldnn else tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
