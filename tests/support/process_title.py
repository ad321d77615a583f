"""Show in /proc the command line and first environment of the program that a fork becomes, as after exec."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_MM_MAP_SIZE = 35, 14, 15  # linux/prctl.h
_NO_FILE = 2**32 - 1
_ADDRESSES = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
)
_FIELDS = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}
"""Of /proc/PID/stat, see proc_pid_stat(5)."""
_libc = ctypes.CDLL(None, use_errno=True)
_shown: list[object] = []  # memory that the kernel reads


class _Map(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


@functools.cache
def can_set_title() -> bool:
    """Return whether this kernel (CONFIG_CHECKPOINT_RESTORE) lets a process without privileges do so."""
    size = ctypes.c_uint32()
    return _prctl(_PR_SET_MM_MAP_SIZE, ctypes.byref(size), 0) == 0 and size.value == ctypes.sizeof(_Map)


def set_title(command: Sequence[bytes], environment: Mapping[bytes, bytes]) -> None:
    """Show them, as exec does."""
    arguments = b"".join(word + b"\0" for word in command)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(arguments + variables) or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(arguments + variables)
    first = ctypes.c_char.from_buffer(memory)
    _shown[:] = [memory, first]
    start = ctypes.addressof(first)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    values = {name: int(fields[number - 3]) for name, number in _FIELDS.items()}
    _libc.sbrk.restype = ctypes.c_void_p
    now = _Map(
        **values, brk=_libc.sbrk(0), arg_start=start, arg_end=middle, env_start=middle, env_end=end, exe_fd=_NO_FILE
    )
    if _prctl(_PR_SET_MM_MAP, ctypes.byref(now), ctypes.sizeof(now)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses another command line in /proc")


def _prctl(what: int, pointer: object, size: int) -> int:
    return int(_libc.prctl(_PR_SET_MM, ctypes.c_ulong(what), pointer, ctypes.c_ulong(size), ctypes.c_ulong(0)))
