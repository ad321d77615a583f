"""The load of every expert over the steps of a run (experts.bin): a header, then one record of fixed size per step.

The header is a line of JSON: version, layers (their numbers), experts (per layer). A record is the number of the step
and the tokens sent to each expert, [layers, experts], all as little-endian uint32.

At most 1024 steps are stored: from step 1025 every second one, from 2049 every fourth, and so on. Which steps are
stored depends on the number of the last step alone, so that the file of a resumed run is that of an uninterrupted one.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalaunch import fs

MAX_STEPS = 1024
"""Most steps that are stored."""
_VERSION = 1


@dataclass(frozen=True)
class ExpertLoadHistory:
    """Tokens sent to each expert in the stored steps.

    Attributes:
        layers: Numbers of the layers with experts.
        steps: Increasing, uint32 [N].
        counts: uint32 [N, layers, experts].
    """

    layers: tuple[int, ...]
    steps: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]


def stored_interval(step: int) -> int:
    """Return the interval of the stored steps when `step` is the last one: a power of 2."""
    return 1 << max(0, (step - 1) // MAX_STEPS).bit_length()


def append_expert_load(path: Path, step: int, layers: Sequence[int], counts_LE: npt.NDArray[Any]) -> None:
    """Append the load of a step, if it is one to store. A file of other layers is replaced. Raises OSError."""
    interval = stored_interval(step)
    if step % interval:
        return
    header = _header(layers, counts_LE.shape[1])
    record = np.zeros(1, _record_type(*counts_LE.shape))
    record["step"], record["counts"] = step, counts_LE
    history = _map_file(path)
    if history is None or history[0] != header:
        fs.write_file_atomically(path, header + record.tobytes(), sync=False)
        return
    records = history[1]
    if len(records) and stored_interval(int(records["step"][-1])) < interval:
        thinned = records[records["step"] % interval == 0]
        fs.write_file_atomically(path, header + thinned.tobytes() + record.tobytes())
        return
    descriptor = fs.open_file(path, os.O_WRONLY)
    try:
        end = len(header) + records.nbytes  # a killed writer may have left a part of a record behind it
        os.ftruncate(descriptor, end)
        if os.pwrite(descriptor, record.tobytes(), end) != record.nbytes:  # a full disk may accept only a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def truncate_expert_load(path: Path, step: int) -> None:
    """Remove the records of steps after `step`. Raises OSError."""
    history = _map_file(path)
    if history is None:
        return
    header, records = history
    kept = int(np.count_nonzero(records["step"] <= step))
    descriptor = fs.open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, len(header) + kept * records.itemsize)
    finally:
        os.close(descriptor)


def read_expert_load(path: Path) -> ExpertLoadHistory | None:
    """Read the file; None if it does not exist or is not one. An incomplete last record is skipped."""
    history = _map_file(path)
    if history is None:
        return None
    header, records = history
    layers = tuple(json.loads(header)["layers"])
    return ExpertLoadHistory(layers, np.array(records["step"]), np.array(records["counts"]))


def _header(layers: Sequence[int], experts: int) -> bytes:
    return (json.dumps({"version": _VERSION, "layers": list(layers), "experts": experts}) + "\n").encode()


def _record_type(layers: int, experts: int) -> np.dtype[np.void]:
    return np.dtype([("step", "<u4"), ("counts", "<u4", (layers, experts))])


def _map_file(path: Path) -> tuple[bytes, npt.NDArray[Any]] | None:
    """Return the header and the complete records; None if the file does not exist or has no valid header.

    Records end where steps no longer increase: a power cut can leave a file longer than its written content. Raises
    OSError for a link.
    """
    try:
        descriptor = fs.open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        header = file.readline()
        try:
            values = json.loads(header)
            kind = _record_type(len(values["layers"]), values["experts"])
        except (ValueError, KeyError, TypeError):
            return None
        if values.get("version") != _VERSION:
            return None
        complete = (os.fstat(file.fileno()).st_size - len(header)) // kind.itemsize
        if not complete:
            return header, np.zeros(0, kind)
        records = np.memmap(file, kind, "r", len(header), (complete,))
    falls = np.flatnonzero(np.diff(records["step"].astype(np.int64), prepend=0) <= 0)
    return header, records[: falls[0] if len(falls) else complete]
