"""Read a torch_dist checkpoint of Megatron-LM: a subprocess unpickles its description, this process reads raw bytes."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES
from megalaunch.rundir.checkpoint.manifest import is_plain_name
from megalaunch.rundir.checkpoint.tensor_index import StoredTensor, stored_tensor

_READER = Path(__file__).with_name("safe_unpickler.py")
_TIMEOUT_SECONDS = 900
_SHOWN = 20  # names per error message
_MOST_LAYERS = 10_000
_TRACKER = "latest_checkpointed_iteration.txt"
_STACKED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LayerTensor:
    """Dtype and shape of one tensor, or of one layer of a stacked tensor."""

    dtype: str
    shape: tuple[int, ...]


class MegatronCheckpoint:
    """An opened and validated checkpoint whose tensors are not read yet. Layers of a stacked tensor get separate names.

    Raises CheckpointError for any other directory, and for pickles that reference classes or functions not on the
    allow list.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = _iteration(directory)
        said = _describe(self.directory)
        self.arguments: Mapping[str, Any] = said["arguments"]
        self.iteration = said["iteration"]
        self._stored: dict[str, StoredTensor] = {}
        self._begins: dict[str, list[int]] = {}
        for name, entry in said["tensors"].items():
            self._take(name, entry)

    @property
    def tensors(self) -> Mapping[str, LayerTensor]:
        """Dtype and shape of every tensor, by its name in an unstacked checkpoint."""
        found = {}
        for name, stored in self._stored.items():
            if _is_stack(name):
                part = name.removeprefix("decoder.layers.")
                for layer in range(stored.shape[0] if stored.shape else 0):
                    found[f"decoder.layers.{layer}.{part}"] = LayerTensor(stored.dtype, stored.shape[1:])
            else:
                found[name] = LayerTensor(stored.dtype, stored.shape)
        return found

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension.

        Raises CheckpointError if its file is truncated or unreadable.
        """
        rows = () if row is None else (row,)
        layer = _STACKED.fullmatch(name)
        if layer is None or name in self._stored:
            return self._concatenate(name, rows)
        return self._concatenate(f"decoder.layers.{layer[2]}", (int(layer[1]), *rows))

    def _concatenate(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Assemble the part of a tensor at `indices` of its first dimensions from its chunks."""
        stored = self._stored[name]
        tensor = torch.empty(stored.shape[len(indices) :], dtype=DTYPES[stored.dtype])
        for chunk, begin in zip(stored.chunks, self._begins[name], strict=True):
            inside = [index - offset for index, offset in zip(indices, chunk.offsets, strict=False)]
            sizes, rest = chunk.shape[: len(indices)], chunk.shape[len(indices) :]
            if not all(0 <= index < size for index, size in zip(inside, sizes, strict=True)):
                continue
            skipped = 0  # parts of this size before this one in the chunk
            for index, size in zip(inside, sizes, strict=True):
                skipped = skipped * size + index
            at = begin + skipped * math.prod(rest) * tensor.dtype.itemsize
            starts = chunk.offsets[len(indices) :]
            box = tuple(slice(start, start + size) for start, size in zip(starts, rest, strict=True))
            tensor[box] = _values(self.directory / chunk.file, at, rest, tensor.dtype, name)
        return tensor

    def _take(self, name: str, entry: dict[str, Any]) -> None:
        """Record one tensor of the description. Raises CheckpointError if it is malformed."""
        try:
            self._stored[name] = stored_tensor(name, entry)
            self._begins[name] = [chunk["begin"] for chunk in entry["chunks"]]
            if _is_stack(name) and self._stored[name].shape[:1] > (_MOST_LAYERS,):
                raise ValueError(
                    f"{name!r} has the shape {list(self._stored[name].shape)}, more layers than models have"
                )
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self.directory}: .metadata is damaged: {error}") from error


def _is_stack(name: str) -> bool:
    """Return True for a tensor that stacks all layers along dim 0, as Megatron saves homogeneous layers."""
    return name.startswith("decoder.layers.") and _STACKED.fullmatch(name) is None


def _iteration(directory: Path) -> Path:
    """Return the folder of the newest iteration if `directory` is that of a run."""
    tracker = directory / _TRACKER
    if (directory / ".metadata").exists() or not tracker.is_file():
        return directory
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()[:40]
    name = f"iter_{int(text):07d}" if text.isdecimal() else text
    if not is_plain_name(name):
        raise CheckpointError(f"{tracker} has {text!r}, which is not an iteration")
    return directory / name


def _describe(directory: Path) -> dict[str, Any]:
    """Unpickle the description in an isolated subprocess and return it. Raises CheckpointError."""
    for name in (".metadata", "common.pt"):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory} is not a torch_dist checkpoint of Megatron-LM: it has no {name} "
                "(convert other formats with Megatron-LM: --ckpt-convert-format torch_dist)"
            )
    command = [sys.executable, "-I", "-S", str(_READER), str(directory.resolve())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{directory}: reading its pickles took over {_TIMEOUT_SECONDS} s") from error
    if done.returncode == -signal.SIGXCPU:  # its limit on CPU time
        raise CheckpointError(f"{directory} is refused: reading its pickles exceeds the CPU time limit for their size")
    try:
        reply = json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise CheckpointError(
            f"{directory}: the process that reads its pickles exited with {done.returncode}: {last[0]}"
        ) from error
    if "refused" in reply:
        names = sorted(reply["refused"].items())
        lines = [f"{name:.200} (in {where})" for name, where in names[:_SHOWN]]
        lines += [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        raise CheckpointError(
            f"{directory} is refused: its pickles name objects other than tensors and plain containers; no code of "
            "them was run:\n  " + "\n  ".join(lines)
        )
    if "problem" in reply:
        raise CheckpointError(f"{directory}: {reply['problem']}")
    return dict(reply)


def _values(path: Path, begin: int, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Read one contiguous chunk at byte `begin` of a file."""
    part = torch.empty(shape, dtype=dtype)
    flat = part.reshape(-1).view(torch.uint8).numpy().data if part.numel() else memoryview(bytearray())
    try:
        with path.open("rb") as file:
            file.seek(begin)
            filled = file.readinto(flat) if len(flat) else 0
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if filled != len(flat):
        raise CheckpointError(f"{path}: is truncated: it ends within {name}")
    return part
