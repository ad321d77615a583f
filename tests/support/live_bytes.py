"""Bytes of the storages that are alive: those of all tensors made while a block of code ran."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`total` counts what was made inside and still is, `peak` the most there was at once."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in before | self._sizes.keys():
                storage = leaf.untyped_storage()
                self._sizes[_key(leaf)] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self._gone, _key(leaf))
        self.peak = max(self.peak, self.total)
        return found

    def _gone(self, key: int) -> None:
        self.total -= self._sizes.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
