"""The weights of a Hugging Face folder under our names: checked as a whole, then read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.paired import PairedWeights
from megalaunch.engine.families.table import FamilyError, family_of, read_config


class ForeignWeights(PairedWeights):
    """Raises one CheckpointError with every unknown word and every missing, unexpected or mis-shaped tensor."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder
        self.notes: list[str] = []
        """Keys of config.json that were ignored, and why."""
        try:
            model = read_config(folder.config, folder.directory.resolve().name, self.notes)
        except FamilyError as error:
            raise _refused(folder, error.problems) from error
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
            what = f"a value in config.json is of another kind than its key has: {str(error)[:200]}"
            raise _refused(folder, [what]) from error
        if model.num_layers > len(folder.tensors):  # before a model of so many is made
            held = len(folder.tensors)
            raise _refused(
                folder, [f"config.json means {model.num_layers:,} layers, and the files hold {held:,} tensors"]
            )
        self._family = family_of(model)
        self._bare = not any(name.startswith(self._family.prefix) for name in folder.tensors)
        super().__init__(folder, model, list(self._family.tensors(model)))
        problems = list(self.problems("config.json means"))
        if problems:
            raise _refused(folder, problems)

    @property
    def origin(self) -> Mapping[str, object]:
        """What a checkpoint keeps of the folder: its true vocabulary and its config.json."""
        return {"vocab_size": self.model.vocab_size, "config": self._folder.config}

    def companions(self) -> Mapping[str, Path]:
        """Files that travel with the weights."""
        return self._folder.companions()

    def stored(self, name: str) -> str:
        """Files of a bare model leave the family's prefix out."""
        return name.removeprefix(self._family.prefix) if self._bare else name

    def is_spare(self, name: str) -> bool:
        """Buffers that old files hold, and a tied head that is kept once more: it has to be the same matrix."""
        if name.endswith(self._family.dropped):
            return True
        if not self.model.tied_embeddings or name not in ("lm_head.weight", "embed_out.weight"):
            return False
        embedding = next(pair.theirs[0] for pair in self.pairs if "embedding.weight" in pair.ours)
        return torch.equal(self._folder.read(name), self._folder.read(self.stored(embedding)))


def _refused(folder: HuggingFaceFolder, problems: list[str]) -> CheckpointError:
    lines = "\n  ".join(problems)
    return CheckpointError(f"{folder.directory} cannot be carried over exactly:\n  {lines}")
