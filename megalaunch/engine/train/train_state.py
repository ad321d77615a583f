"""Save and restore the training state: weights, optimizer moments, step and token count, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.model import ModelSpec
from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.store import load_checkpoint, read_document, save_checkpoint
from megalaunch.engine.model.decoder import strip_vocab_padding
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.fs import write_file_atomically
from megalaunch.rundir.checkpoint.names import ORIGIN, POSITION, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.paths import RunDirectory


@dataclass(frozen=True)
class TrainProgress:
    """Steps and tokens of a run so far. Data order is a pure function of the step: the loader has no other state."""

    step: int
    tokens: int


@dataclass(frozen=True)
class AsyncSaveContext:
    """State of an asynchronous save: host copies of this rank's tensors and a gloo group for the save threads."""

    copies: Mapping[str, Tensor]
    group: ProcessGroup | None


def state_tensors(model: ModelParts, optimizer: NamedAdamW) -> Mapping[str, Tensor]:
    """Return weights (`model.<name>`) and moments (`optimizer.<moment>.<name>`): global shapes, sharing memory."""
    weights = {WEIGHTS + name: parameter.detach() for name, parameter in model.named_parameters()}
    return weights | optimizer.states()


def _saved_shapes(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, torch.Size]:
    """Return the saved shapes of tensors whose vocabulary is padded for this layout: padding rows are not saved."""
    assert spec.vocab_size is not None, "a model that exists has a vocabulary"
    shapes = {name: strip_vocab_padding(name, tensor.shape, spec.vocab_size) for name, tensor in tensors.items()}
    return {name: shape for name, shape in shapes.items() if shape != tensors[name].shape}


def tokenizer_vocab_size(directory: RunDirectory, spec: RunSpec) -> int:
    """Return the vocabulary size of the run's tokenizer; 0 without one. Raises CheckpointError."""
    if spec.tokenizer.path is None:
        return 0
    try:
        return load_tokenizer(directory.tokenizer).vocab_size
    except DataError as error:
        raise CheckpointError(f"the run's tokenizer cannot be read: {error}") from error


def true_vocab_size(directory: RunDirectory, spec: RunSpec) -> int:
    """Return the number of tokens without vocabulary padding. Raises CheckpointError.

    This is `model.vocab_size`, or less in a run that started from pretrained weights: rows beyond both the vocabulary
    of those weights and the tokenizer are padding, which exports leave out.
    """
    size = spec.model.vocab_size or 0
    if spec.data.mock or not (directory.origin / f"{ORIGIN}.json").is_file():
        return size
    document = read_document(directory.origin, ORIGIN)
    began = document.get("vocab_size") if isinstance(document, Mapping) else None
    return min(size, max(began, tokenizer_vocab_size(directory, spec))) if isinstance(began, int) else size


def save_tokenizer(directory: RunDirectory, spec: RunSpec) -> None:
    """Copy the tokenizer into the run directory, once, so that the run does not depend on the cache it came from.

    A tokenizer in another file format is converted to tokenizer.json. Collective; raises the same CheckpointError on
    all ranks.
    """

    def keep() -> None:
        if spec.tokenizer.path is None or directory.tokenizer.is_file():
            return
        try:
            content = load_tokenizer(Path(spec.tokenizer.path)).to_json()
        except DataError as error:
            raise CheckpointError(f"the tokenizer cannot be kept with the run: {error}") from error
        write_file_atomically(directory.tokenizer, content)

    run_on_rank0(keep)


def save_run(
    directory: RunDirectory,
    spec: RunSpec,
    tensors: Mapping[str, Tensor],
    position: TrainProgress,
    wrote: Callable[[int, int], None],
    async_context: AsyncSaveContext | None = None,
) -> Path:
    """Save everything that a resume, generation or an export needs. Collective.

    Args:
        directory: The run directory.
        spec: The run spec.
        tensors: Training state (`state_tensors`).
        position: Step and tokens at which the state was taken.
        wrote: Progress callback of `save_checkpoint`.
        async_context: Host copies and process group of an asynchronous save; None: save on the calling thread.

    Returns:
        The checkpoint directory.

    Raises:
        CheckpointError: The same on all ranks.
    """
    target = directory.checkpoint(position.step)
    files = {SPEC_FILE: directory.spec}
    if spec.tokenizer.path is not None:
        files[TOKENIZER_FILE] = directory.tokenizer
    if directory.origin.is_dir():
        files |= {path.name: path for path in sorted(directory.origin.iterdir())}
    documents = {POSITION: {"step": position.step, "tokens": position.tokens}}
    copies, group = (async_context.copies, async_context.group) if async_context else (None, None)
    shapes = _saved_shapes(tensors, spec.model)
    save_checkpoint(target, tensors, documents, files, shapes=shapes, copies=copies, group=group, wrote=wrote)
    return target


def restore_run(checkpoint: Path, spec: ModelSpec, model: ModelParts, optimizer: NamedAdamW) -> TrainProgress:
    """Load model and optimizer in place; return the progress. Collective; raises one CheckpointError on all ranks."""
    tensors = state_tensors(model, optimizer)
    load_checkpoint(checkpoint, tensors, _saved_shapes(tensors, spec))
    document = run_on_rank0(lambda: read_document(checkpoint, POSITION))
    numbers = [document.get(key) for key in ("step", "tokens")] if isinstance(document, Mapping) else []
    step, tokens = numbers if len(numbers) == 2 else (None, None)
    if type(step) is not int or type(tokens) is not int or min(step, tokens) < 0:
        raise CheckpointError(f"{checkpoint / POSITION}.json holds no step and tokens")
    position = TrainProgress(step, tokens)
    optimizer.set_step(position.step)
    return position
