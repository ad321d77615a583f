"""Read a checkpoint in one process: whole tensors put together from their parts.

Nothing here needs a process group or DCP, whose import takes longer than reading a small checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES, MappedFile
from megalaunch.rundir.checkpoint.tensor_index import CATALOGUE, Catalogue, read_tensor_index

_SHOWN = 8  # names of tensors in one error


def read_tensors(directory: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, in one process without a process group; `names=None` reads all of them.

    Raises CheckpointError when one is missing or a file is not what the catalogue says.
    """
    catalogue = read_tensor_index(directory)
    wanted = list(catalogue) if names is None else list(names)
    missing = [name for name in wanted if name not in catalogue]
    if missing:
        raise CheckpointError(f"the checkpoint {directory} holds no {_listed(missing)}")
    files: dict[str, MappedFile] = {}
    return {name: full_tensor(directory, name, catalogue, files) for name in wanted}


def full_tensor(directory: Path, name: str, catalogue: Catalogue, files: dict[str, MappedFile]) -> torch.Tensor:
    """One tensor of a read catalogue; `files` keeps what was opened for the next one."""
    stored, dtype = catalogue[name], DTYPES[catalogue[name].dtype]
    parts = []
    for chunk in stored.chunks:  # every part is checked before memory is taken for the whole
        if chunk.file not in files:
            files[chunk.file] = MappedFile(directory / chunk.file)
        parts.append(stored_slice(files[chunk.file], name, dtype, chunk.shape))
    whole = torch.empty(stored.shape, dtype=dtype)
    for chunk, part in zip(stored.chunks, parts, strict=True):
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))
        whole[box] = part
    return whole


def stored_slice(file: MappedFile, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a file. Raises CheckpointError when it is not what the catalogue says."""
    part = file.tensor(name)
    if part.dtype != dtype or part.shape != shape:
        raise CheckpointError(f"{file.path}: {name!r} is {part.dtype} {list(part.shape)}, {CATALOGUE} says otherwise")
    return part


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
