"""A Hugging Face folder: config.json and safetensors, read one tensor at a time. No code of the folder is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES
from megalaunch.importers.huggingface import folder as importer
from megalaunch.importers.huggingface.folder import CONFIG, INDEX, WEIGHTS_FILE
from megalaunch.rundir.checkpoint.header import Entry, read_header
from megalaunch.rundir.checkpoint.manifest import is_plain_name

# Files that belong to a model in addition to its weights; copied with it.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceFolder:
    """An opened folder: headers are read and checked, tensor data is not read yet. Raises CheckpointError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        other = other_format(directory)
        if other is not None:
            raise CheckpointError(other)
        if not (directory / CONFIG).is_file():
            cause = f"has no {CONFIG}" if directory.is_dir() else "is not a directory"
            raise CheckpointError(
                f"{directory} {cause}: name a Hugging Face folder with {CONFIG} and safetensors files"
            )
        self.config = _json(directory / CONFIG)
        self._entries: dict[str, tuple[Path, Entry]] = {}
        for name in self._files():
            path = directory / name
            try:
                with path.open("rb") as file:
                    found = read_header(str(path), file.read, path.stat().st_size)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            except CheckpointError as error:
                raise CheckpointError(f"{error}; copy or download it again") from error
            twice = found.keys() & self._entries.keys()
            if twice:
                raise CheckpointError(f"{directory}: two files have the same tensors: {', '.join(sorted(twice))}")
            self._entries |= {tensor: (path, entry) for tensor, entry in found.items()}

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """Dtype and shape of every tensor."""
        return {name: entry for name, (_, entry) in self._entries.items()}

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension, into memory that it owns.

        Mapped pages would count as this process's memory. Raises CheckpointError.
        """
        path, entry = self._entries[name]
        size, shape = entry.end - entry.begin, entry.shape
        if row is not None:
            size, shape = size // shape[0], shape[1:]
        buffer = torch.empty(size, dtype=torch.uint8)
        try:
            with path.open("rb") as file:
                file.seek(entry.begin + (row or 0) * size)
                filled = file.readinto(buffer.numpy().data) if len(buffer) else 0
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if filled != len(buffer):
            raise CheckpointError(f"{path}: is truncated: it ends within {name}")
        return buffer.view(DTYPES[entry.dtype]).reshape(shape)

    def companions(self) -> dict[str, Path]:
        """Return the tokenizer files, generation config and the like, by name."""
        return {name: self.directory / name for name in COMPANIONS if (self.directory / name).is_file()}

    def _files(self) -> list[str]:
        """Return the names of the safetensors files: from the index, or the single file. Raises CheckpointError."""
        index = self.directory / INDEX
        if index.is_file():
            named = _json(index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
                raise CheckpointError(f"{index}: weight_map must map tensors to file names; copy the file again")
            names = sorted(set(named.values()))
            if not names or not all(is_plain_name(name) for name in names):
                raise CheckpointError(f"{index}: weight_map must name files of the folder; copy the file again")
            missing = [name for name in names if not (self.directory / name).is_file()]
            if missing:
                raise CheckpointError(f"{self.directory} lacks {', '.join(missing)} of {INDEX}; copy or download them")
            return names
        if (self.directory / WEIGHTS_FILE).is_file():
            return [WEIGHTS_FILE]
        pickles = sorted(path.name for pattern in _PICKLES for path in self.directory.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{self.directory} has pickled weights ({', '.join(pickles[:3])}), which are not read: opening a "
                "pickle can run any code. If you trust their origin, convert them with "
                "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise CheckpointError(f"{self.directory} has neither {WEIGHTS_FILE} nor {INDEX}")


def other_format(path: Path) -> str | None:
    """Return why a known but unsupported weight format is refused; None for any other path."""
    try:
        return importer.other_format(path)
    except importer.FolderError as error:
        raise CheckpointError(str(error)) from error


def is_huggingface(directory: Path) -> bool:
    """Return True if `directory` has a config.json and no manifest.json (which a megalaunch checkpoint has)."""
    return (directory / CONFIG).is_file() and not (directory / "manifest.json").exists()


def _json(path: Path) -> dict[str, Any]:
    try:
        return importer.read_json(path)
    except importer.FolderError as error:
        raise CheckpointError(str(error)) from error
