"""The weights of a Hugging Face folder under our names: checked as a whole, then read tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.safetensors_file import DTYPES
from megalaunch.engine.families.family import FamilyFile
from megalaunch.engine.families.pairs import Pair
from megalaunch.engine.families.registry import build_decoder
from megalaunch.engine.families.table import FamilyError, family_of, read_config


class ForeignWeights:
    """Raises one CheckpointError with every unknown word and every missing, unexpected or mis-shaped tensor."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder
        try:
            self.model = read_config(folder.config, folder.directory.resolve().name)
        except FamilyError as error:
            raise _refused(folder, error.problems) from error
        family = family_of(self.model)
        self._bare = not any(name.startswith(family.prefix) for name in folder.tensors)
        self._prefix = family.prefix
        self.pairs = list(family.tensors(self.model))
        self.shapes = parameter_shapes(self.model)
        problems = list(self._problems(family))
        if problems:
            raise _refused(folder, problems)
        self._pair_of = {name: pair for pair in self.pairs for name in pair.ours}

    def read(self, name: str) -> Tensor:
        """One of the decoder's parameters, in the stored format."""
        return self._ours(self._pair_of[name])[name]

    @property
    def origin(self) -> Mapping[str, object]:
        """What a checkpoint keeps of the folder: its true vocabulary and its config.json."""
        return {"vocab_size": self.model.vocab_size, "config": self._folder.config}

    def companions(self) -> Mapping[str, Path]:
        """Files that travel with the weights."""
        return self._folder.companions()

    def dtype(self, name: str) -> torch.dtype:
        """Its stored format."""
        return DTYPES[self._folder.tensors[self._stored(self._pair_of[name].theirs[0])].dtype]

    def walk(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The wanted ones, each stored tensor read once."""
        for pair in self.pairs:
            if any(name in wanted for name in pair.ours):
                yield from ((name, tensor) for name, tensor in self._ours(pair).items() if name in wanted)

    def _ours(self, pair: Pair) -> dict[str, Tensor]:
        theirs = [self._folder.read(self._stored(name)) for name in pair.theirs]
        return dict(zip(pair.ours, pair.to_ours(theirs), strict=True))

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._prefix) if self._bare else name

    def _problems(self, family: FamilyFile) -> Iterator[str]:
        stored = self._folder.tensors
        expected: dict[str, torch.Size] = {}
        for pair in self.pairs:
            expected |= {self._stored(name): shape for name, shape in pair.shapes_of_theirs(self.shapes).items()}
        for name, shape in expected.items():
            if name not in stored:
                yield f"missing: {name} {list(shape)}"
            elif stored[name].shape != tuple(shape):
                yield f"mis-shaped: {name} is {list(stored[name].shape)}, config.json means {list(shape)}"
            elif not DTYPES[stored[name].dtype].is_floating_point:
                yield f"{name} is stored as {stored[name].dtype}: quantised weights are not read"
        for name in stored:
            if name not in expected and not name.endswith(family.dropped) and not self._is_tied_head(name):
                yield f"unexpected: {name} {list(stored[name].shape)}"

    def _is_tied_head(self, name: str) -> bool:
        """Some files keep a tied head once more; it has to be the same matrix."""
        if not self.model.tied_embeddings or name not in ("lm_head.weight", "embed_out.weight"):
            return False
        embedding = next(pair.theirs[0] for pair in self.pairs if "embedding.weight" in pair.ours)
        return torch.equal(self._folder.read(name), self._folder.read(self._stored(embedding)))


def parameter_shapes(model: ModelSpec) -> Mapping[str, torch.Size]:
    """Global shapes of the decoder's parameters by name."""
    with torch.device("meta"):
        decoder = build_decoder(model)
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def _refused(folder: HuggingFaceFolder, problems: list[str]) -> CheckpointError:
    lines = "\n  ".join(problems)
    return CheckpointError(f"{folder.directory} cannot be carried over exactly:\n  {lines}")
