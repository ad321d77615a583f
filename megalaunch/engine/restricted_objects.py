"""What ranks may send each other as Python objects: plain data, and the records of checkpoints and endings.

Object collectives (torch's checkpoints use them too) are pickles, which can name any callable. gloo does not know who
connects to it, so a pickle that came over the network names only what stands here, or it is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import traceback
from typing import Any

import torch
from torch.distributed import distributed_c10d

_RECORDS = (
    *("megalaunch.engine.", "megalaunch.rundir.", "megalaunch.data."),
    *("torch.distributed.checkpoint.", "torch.distributed.pipelining."),
)
_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("datetime", "timedelta"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),  # looks a tensor's layout up by its name
}


class DisallowedObject(Exception):
    """A pickle from another rank names something that no rank sends."""


class _Unpickler(distributed_c10d._unpickler):
    """Torch's, with names looked up in the list above; nothing is imported for them."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names; raises DisallowedObject."""
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if (module, name) in _PLAIN or _is_record(module, found):
            return found
        raise DisallowedObject(f"another rank sent an object of {module}.{name}, which no rank of a run sends")


def _is_record(module: str, found: Any) -> bool:
    if isinstance(found, torch.dtype):
        return True
    if not isinstance(found, type):  # functions are called, and so are not data
        return False
    if issubclass(found, BaseException) or found in (traceback.StackSummary, traceback.FrameSummary):
        return True
    return module.startswith(_RECORDS) and (dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, tuple)))


def install_restricted_unpickler() -> None:
    """From now on, object collectives of this process take only what is listed here."""
    distributed_c10d._unpickler = _Unpickler
