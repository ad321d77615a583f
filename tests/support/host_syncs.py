"""Record where the host waits for a device: reads of tensors on it, and copies that block."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalaunch.engine.simulate.simulated_operators import SimulatedOperators
from megalaunch.engine.torch_private import READ_SCALAR

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense: "item", _aten.equal: "equal", _aten.is_nonzero: "bool"}
_SIZED_BY_VALUES = {
    _aten.nonzero: "nonzero",
    _aten.masked_select: "masked_select",
    _aten._unique2: "unique",
    _aten.unique_consecutive: "unique",
    _aten.bincount: "bincount",
}
_INDEXED = {_aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_}


class HostSyncs(TorchDispatchMode):
    """Dispatch mode that notes (kind, "file:function") of each operator for which the host waits for the device.

    Pageable memory is copied to a device when its stream has come there, so such a copy counts too, and so does a
    tensor of Python numbers that is made on the device. torch's grouped matmul reads its offsets where it multiplies
    group by group: on the newest GPUs in all dtypes but bf16.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented  # its local tensors come here again
        output = function(*args, **kwargs)
        kind = self._kind(function, args, kwargs, leaves, output)
        if kind is not None:
            self.found.append((kind, _caller()))
        return output

    def _kind(self, function: Any, args: Any, kwargs: Any, leaves: list[Any], output: Any) -> str | None:
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.device.type == self._device for leaf in leaves)
        packet = function.overloadpacket
        if packet in (_aten._to_copy, _aten.copy_):
            source, target = (args[0], output) if packet is _aten._to_copy else (args[1], args[0])
            blocking = not (kwargs.get("non_blocking") or (packet is _aten.copy_ and args[2:] and args[2]))
            ways = source.device.type, target.device.type
            if ways == (self._device, "cpu"):
                return "to host"
            return "from pageable memory" if ways == ("cpu", self._device) and blocking else None
        if not on_device:
            return None
        if packet is _aten.lift_fresh:
            return "from pageable memory"
        if packet is _aten._grouped_mm and output.dtype != torch.bfloat16:
            return "group by group"
        if packet is _aten.repeat_interleave and kwargs.get("output_size") is None and "Tensor" in str(function):
            return "repeat_interleave"
        if packet in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1]):
            return "boolean index"
        return _READS.get(packet) or _SIZED_BY_VALUES.get(packet)


class SimulatedReads(SimulatedOperators):
    """The mode of a deep plan, which notes in `found` each function that reads a number of a fake tensor."""

    found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is READ_SCALAR:
            self.found.append(_caller())
        return super().__torch_dispatch__(function, types, args, kwargs)


def _caller() -> str:
    """The innermost function of the engine on the stack."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "engine" in path.parts or "kernels" in path.parts:
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
