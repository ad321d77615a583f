"""Autograd's sums of gradients, which a simulated step must make in place where a real one does.

A tensor that several operators read gets a gradient from each. Autograd adds them in place if nothing else holds the
first; in a dispatch mode it never does, so that the simulation would hold one tensor more.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from megalaunch.engine.torch_private import TorchDispatchMode, count_holders, make_fake_tensor_mode

_ADD = torch.ops.aten.add.Tensor
_BACKWARD = "_engine_run_backward"  # torch.autograd.graph's function, in which autograd runs
_DISPATCH = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py")  # files of frames between autograd and a mode


class GradSums:
    """Knows which sums autograd would make in place.

    How many holders a tensor has in a dispatch mode that nothing else holds depends on the versions of Python and
    torch: they are counted once, in a backward pass that sums two gradients.
    """

    def __init__(self) -> None:
        self._unshared: tuple[int, ...] = ()
        with make_fake_tensor_mode(), _CountHolders(self):
            x = torch.ones(1, requires_grad=True) * 1
            torch.autograd.backward((x.sin() * x.cos()).sum())
        assert self._unshared, "autograd sums the gradients of a tensor that two operators read"

    def count(self, function: Any, args: tuple[Any, ...]) -> None:
        """Count the holders of the first gradient if the operator is such a sum."""
        if _is_sum(function):
            self._unshared = count_holders(args[0])

    def is_in_place(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Return whether autograd would write the result of an operator over its first argument."""
        return _is_sum(function) and all(
            has <= least for has, least in zip(count_holders(args[0]), self._unshared, strict=True)
        )


class _CountHolders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that shows every operator to `GradSums.count`."""

    def __init__(self, sums: GradSums) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums = sums

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._sums.count(function, args)
        return function(*args, **(kwargs or {}))


def _is_sum(function: Any) -> bool:
    """Return whether autograd itself, and no Python function in it, calls an addition in a dispatch mode."""
    if function is not _ADD:
        return False
    frame: FrameType | None = sys._getframe(3)  # of the dispatch mode's caller
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _BACKWARD
