"""Weights of a Hugging Face folder under the decoder's names: validated together, then read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.mapped_weights import MappedWeights
from megalaunch.engine.checkpoint.quantized_weights import DequantizedFolder
from megalaunch.engine.weight_maps.weight_mapping import stored_name
from megalaunch.engine.weight_maps.weights import get_family_weights, get_multimodal
from megalaunch.importers.huggingface.registry import FamilyError, from_hf_config
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.mtp import MultiTokenSpec


class HuggingFaceWeights(MappedWeights):
    """A Hugging Face folder mapped to the decoder's parameters.

    Raises CheckpointError that lists every unknown key of config.json, and every missing, unexpected or mis-shaped
    tensor.
    """

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder
        self.notes: list[str] = []
        """Ignored items with the reason: keys of config.json, and tensors outside the decoder."""
        try:
            model = from_hf_config(folder.config, folder.directory.resolve().name, self.notes)
            self._weights = get_family_weights(model)
        except FamilyError as error:
            raise _family_error(folder, error.problems) from error
        source = DequantizedFolder(folder)
        if model.num_layers > len(source.tensors):  # before a decoder of that many layers is built
            count = len(source.tensors)
            raise _family_error(
                folder, [f"config.json has {model.num_layers:,} layers, but the files have only {count:,} tensors"]
            )
        multimodal = get_multimodal(folder.config)
        self._skipped = () if multimodal is None else multimodal.vision
        self._layout = {} if multimodal is None else multimodal.layout(folder.tensors)
        skipped = [name for name in source.tensors if self._is_skipped(name)]
        if skipped:
            self.notes.append(f"{len(skipped)} tensors of the image encoder ({skipped[0]}, ...) are not read")
        self._bare = not any(name.startswith(self._weights.prefix) for name in folder.tensors)
        model = self._without_missing_depths(model, source)
        super().__init__(source, model, self._weights.mappings(model, source.tensors))
        problems = list(self.problems("config.json expects"))
        if problems:
            raise _family_error(folder, problems)

    def _without_missing_depths(self, model: ModelSpec, source: DequantizedFolder) -> ModelSpec:
        """Return the model without multi-token prediction if the files have no tensor of it.

        transformers neither reads nor writes these layers, but keeps their number in config.json.
        """
        first = f"layers.{model.num_layers}."
        if not model.mtp.num_layers or any(name.removeprefix("model.").startswith(first) for name in source.tensors):
            return model
        self.notes.append("the files have no layers of multi-token prediction, though config.json does: left out")
        return replace(model, mtp=MultiTokenSpec())

    @property
    def origin(self) -> Mapping[str, object]:
        """The document that a checkpoint saves about the folder: its true vocabulary size and its config.json."""
        return {"vocab_size": self.model.vocab_size, "config": self._folder.config}

    def companions(self) -> Mapping[str, Path]:
        """Return the folder's tokenizer and generation files."""
        return self._folder.companions()

    def tensor_infos(self, name: str) -> str:
        """Return the name of a tensor in this folder.

        Files of a bare model omit the family's prefix; those of a multimodal model have another one.
        """
        return stored_name(name.removeprefix(self._weights.prefix) if self._bare else name, self._layout)

    def unmapped_problem(self, name: str) -> str | None:
        """Return what is wrong with a tensor that maps to no parameter; None if it may be skipped.

        Those are buffers of old files, tensors of the vision tower, and tensors stored twice, which must be equal: a
        tied head, and the embedding and the head in layers of multi-token prediction.
        """
        if name.endswith(self._weights.dropped) or self._is_skipped(name):
            return None
        original = self._original_of(name)
        if original is None:
            return super().unmapped_problem(name)
        if torch.equal(self._folder.read(name), self._folder.read(original)):
            return None
        return f"{name} differs from {original}, but the model has one parameter for both"

    def _original_of(self, name: str) -> str | None:
        """Return the stored tensor that `name` is a copy of; None if it is no copy."""
        copies = self._weights.copies(self.model).items()
        original = {self.tensor_infos(copy): self.tensor_infos(first) for copy, first in copies}.get(name)
        heads = ("lm_head.weight", "embed_out.weight", self._head()) if self.model.tie_word_embeddings else ()
        if name in heads:
            return self.tensor_infos(next(pair.theirs[0] for pair in self.pairs if "embedding.weight" in pair.ours))
        return original

    def _is_skipped(self, name: str) -> bool:
        return name.startswith(self._skipped)

    def _head(self) -> str:
        return self.tensor_infos("lm_head.weight")


def _family_error(folder: HuggingFaceFolder, problems: list[str]) -> CheckpointError:
    lines = "\n  ".join(problems)
    return CheckpointError(f"{folder.directory} cannot be converted exactly:\n  {lines}")
