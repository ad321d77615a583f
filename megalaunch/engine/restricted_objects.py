"""Restrict the Python objects that ranks accept from each other: plain data, and dataclasses of runs and checkpoints.

Object collectives (used by torch's checkpoints too) send pickles, which can name any callable. gloo does not
authenticate connections, so a pickle from the network may name only the types listed here; other names are refused.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import traceback
from typing import Any

import torch

from megalaunch.engine.torch_private import ObjectUnpickler, set_object_unpickler

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
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),  # returns a torch.layout by name
}


class DisallowedObject(Exception):
    """A pickle from another rank names a type that ranks do not send."""


class _Unpickler(ObjectUnpickler):
    """torch's unpickler, restricted to the allowed names; it never imports a module."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names; raises DisallowedObject."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if (module, name) in _PLAIN or _is_record(module, found):
            return found
        raise DisallowedObject(f"another rank sent an object of {module}.{name}, which no rank of a run sends")


def _enum_member(found: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration by its name: Python 3.11.0 to 3.11.3 send members as calls of getattr."""
    if isinstance(found, enum.EnumType) and name in found.__members__:
        return found[name]
    raise DisallowedObject("another rank sent an object of builtins.getattr, which no rank of a run sends")


def _is_record(module: str, found: Any) -> bool:
    if isinstance(found, torch.dtype):
        return True
    if not isinstance(found, type):  # pickles call functions, so none is allowed
        return False
    if issubclass(found, BaseException) or found in (traceback.StackSummary, traceback.FrameSummary):
        return True
    return module.startswith(_RECORDS) and (dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, tuple)))


def install_restricted_unpickler() -> None:
    """Make all object collectives of this process use the restricted unpickler."""
    set_object_unpickler(_Unpickler)
