"""The header of a safetensors file: its length in 8 bytes, then JSON with dtype, shape and offsets of each tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalaunch.rundir.checkpoint.errors import CheckpointError

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `dtype` is safetensors' name, `begin` and `end` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(name: str, read: Callable[[int], bytes], size: int) -> dict[str, Entry]:
    """Parse and validate the header of a safetensors file.

    Args:
        name: the file's name, for error messages.
        read: reads the next n bytes of the file, which is opened at its start.
        size: size of the file in bytes.

    Raises:
        CheckpointError: lengths, offsets, shapes or dtypes do not fit the file, overlap, or leave gaps.
    """
    length = int.from_bytes(read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{name}: is no safetensors file, or is truncated ({size} bytes)")
    try:
        header = json.loads(read(length).decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is no mapping")
        header.pop("__metadata__", None)
        entries = {key: _entry(key, value, 8 + length) for key, value in header.items()}
        _require_gapless(entries, 8 + length, size)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: bad safetensors header: {error}") from error
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of JSON pairs; raise ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name occurs twice")
    return mapping


def _entry(name: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is no tensor entry")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not are_sizes(shape) or not _are_places(offsets):
        raise ValueError(f"{name!r} has invalid sizes")
    if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        raise ValueError(f"{name!r} has {offsets[1] - offsets[0]} bytes, which its shape {shape} does not need")
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _are_places(offsets: Any) -> bool:
    """Return True for a pair of non-negative file offsets. Each is checked alone: their product has no meaning."""
    return isinstance(offsets, list) and len(offsets) == 2 and all(are_sizes([offset]) for offset in offsets)


def are_sizes(values: Any) -> bool:
    """Return True for a list of non-negative integers whose product fits torch's integers."""
    is_shape = isinstance(values, list) and len(values) <= 64 and all(type(value) is int for value in values)
    return is_shape and all(value >= 0 for value in values) and math.prod(max(value, 1) for value in values) < 2**60


def _require_gapless(entries: Mapping[str, Entry], start: int, size: int) -> None:
    position = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise ValueError("tensors overlap or leave a gap")
        position = entry.end
    if position != size:
        raise ValueError(f"the tensors end at byte {position}, the file at {size}")
