"""Save and restore a run: its checkpoints, one save at a time and old ones removed, and the training state in them.

The state of a run is its weights, optimizer moments, step and token count, in fp16 the loss scale, and with
delayed fp8 scaling the amax histories; the data order is a function of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.dcp_storage import Hold
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.store import load_checkpoint, prune_checkpoints, read_document, save_checkpoint
from megalaunch.engine.model.decoder import strip_vocab_padding
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.outer_optimizer import saved_replicas
from megalaunch.engine.parallel.float8 import float8_states, restore_float8
from megalaunch.engine.train.background_save import AsyncSaveContext, BackgroundSave
from megalaunch.engine.train.expert_load import router_states
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.storage_retry import STORAGE, retry_while_storage_fails
from megalaunch.fs import write_file_atomically
from megalaunch.plan.overrides import override_changes
from megalaunch.rundir.checkpoint.contents import JSON, ORIGIN, OVERRIDES, POSITION, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.model import ModelSpec


class Checkpointer:
    """Synchronous and asynchronous saves of one run. The constructor and every method are collective.

    Attributes:
        saved: Directory of the newest finished checkpoint; None before the first.
        background: The thread of asynchronous saves, which local checkpoints on disk share.
    """

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, model: ModelParts, optimizer: Optimizer, record: RunLogger
    ) -> None:
        self._spec, self._directory, self._record = spec, directory, record
        self._model, self._optimizer = model, optimizer
        self.saved: Path | None = None
        is_async = spec.checkpoint.async_save and spec.checkpoint.interval > 0
        self.background = BackgroundSave(record, is_async or spec.checkpoint.local.interval > 0)

    def save(self, position: TrainProgress) -> bool:
        """Save synchronously; return False if this step is already saved.

        Raises CheckpointError or a RunEnd, the same on all ranks.
        """
        started = time.perf_counter()
        if not self._begin(position):
            return False
        self._record.phase("saving", position.step)
        self._write(position, state_tensors(self._model, self._optimizer), started)
        return True

    def save_async(self, position: TrainProgress) -> None:
        """Copy the state to host memory and write it on a background thread; return when the copy is done.

        There is one save at a time: wait for the previous one first. A failure is reported later, as a `problem`.
        Without `checkpoint.async_save` this is `save`.
        """
        if not self._spec.checkpoint.async_save:
            if self.save(position):
                self._record.phase("training", position.step)
            return
        started = time.perf_counter()
        if self._begin(position):
            # Take the sharded parameters now: during a forward pass the model's attributes are FSDP's gathered ones.
            tensors = state_tensors(self._model, self._optimizer)
            self.background.stage(position, tensors, started, self._write)

    def _begin(self, position: TrainProgress) -> bool:
        """Wait for the previous save and sync the metrics to disk; return False if this step is already saved.

        A resume keeps the metrics up to its checkpoint's step, so they must be on disk before the checkpoint is.
        """
        problem = self.background.wait_here()
        raise_on_all_ranks(self._record.problem or problem, position.step)
        if self.saved == self._directory.checkpoint(position.step):
            return False
        self.sync_metrics(position)
        return True

    def sync_metrics(self, position: TrainProgress) -> None:
        """Write and sync the metrics up to this position; raises a CheckpointError if the storage does not return."""

        def waiting() -> None:
            self._record.heartbeat(STORAGE, position.step)

        retry_while_storage_fails(self._record, partial(run_on_rank0, self._record.sync_metrics), waiting)

    def _write(
        self,
        position: TrainProgress,
        tensors: Mapping[str, Tensor],
        started: float,
        async_context: AsyncSaveContext | None = None,
        waited: float | None = None,
    ) -> None:
        """Write the checkpoint and remove old ones. An asynchronous save runs this on its thread."""
        wrote = partial(self.background.report_progress, position.step, in_background=async_context is not None)

        def save() -> Path:
            hold = self._record.fence.hold
            return save_run(self._directory, self._spec, tensors, position, wrote, async_context, hold)

        def waiting() -> None:
            self.background.report_wait()
            if async_context is None:
                self._record.heartbeat(STORAGE, position.step)

        group = async_context.group if async_context else None
        saved = retry_while_storage_fails(self._record, save, waiting, group)
        seconds = time.perf_counter() - started
        waited = seconds if waited is None else waited
        self._record.event("checkpoint", step=position.step, path=str(saved), seconds=seconds, waited_seconds=waited)
        if self._record.is_first:
            self._remove_old(saved)
        self.saved = saved

    def _remove_old(self, newest: Path) -> None:
        try:
            settings = self._spec.checkpoint
            with self._record.fence.hold():
                prune_checkpoints(self._directory.checkpoints, settings.keep_last, newest, settings.keep_every)
        except OSError as error:  # the new checkpoint is complete: a failure to prune is only logged
            self._record.event("note", message=f"old checkpoints could not be removed: {error}")


def state_tensors(model: ModelParts, optimizer: Optimizer) -> Mapping[str, Tensor]:
    """Return weights (`model.<name>`) and moments (`optimizer.<moment>.<name>`): global shapes, sharing memory.

    Weights include the buffers of the model, which have no moments. Routers may have a state of their own. With outer
    steps (`parallel.outer_steps`) the weights are the outer ones, and each replica has moments of its own.
    """
    if optimizer.outer is not None:
        return optimizer.outer.saved_tensors(WEIGHTS, weight_tensors(model), optimizer.states())
    return {**weight_tensors(model), **optimizer.states(), **router_states(model), **float8_states(model)}


def weight_tensors(model: ModelParts) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of the model by their names in a checkpoint."""
    weights = {WEIGHTS + name: parameter.detach() for name, parameter in model.named_parameters()}
    return weights | {WEIGHTS + name: buffer for name, buffer in model.named_buffers()}


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

    def save() -> None:
        if spec.tokenizer.path is None or directory.tokenizer.is_file():
            return
        try:
            content = load_tokenizer(Path(spec.tokenizer.path)).to_json()
        except DataError as error:
            raise CheckpointError(f"the tokenizer cannot be saved with the run: {error}") from error
        write_file_atomically(directory.tokenizer, content)

    run_on_rank0(save)


def save_run(
    directory: RunDirectory,
    spec: RunSpec,
    tensors: Mapping[str, Tensor],
    position: TrainProgress,
    wrote: Callable[[int, int], None],
    async_context: AsyncSaveContext | None = None,
    hold: Hold = nullcontext,
) -> Path:
    """Save everything that a resume, generation or an export needs. Collective.

    Args:
        directory: The run directory.
        spec: The run spec.
        tensors: Training state (`state_tensors`).
        position: Step and tokens at which the state was taken.
        wrote: Progress callback of `save_checkpoint`.
        async_context: Host copies and process group of an asynchronous save; None: save on the calling thread.
        hold: As `save_checkpoint`'s.

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
    documents: Mapping[str, JSON] = {OVERRIDES: list(spec.platform.overrides)}
    save_state(target, spec.model, tensors, position, files, documents, wrote, async_context, hold)
    return target


def save_state(
    target: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    position: TrainProgress,
    files: Mapping[str, Path],
    documents: Mapping[str, JSON] = MappingProxyType({}),
    wrote: Callable[[int, int], None] = lambda done, total: None,
    async_context: AsyncSaveContext | None = None,
    hold: Hold = nullcontext,
) -> None:
    """Save the training state as the checkpoint `target`; arguments as `save_run`'s and `save_checkpoint`'s."""
    documents = {**documents, POSITION: position.to_document()}
    copies, group = (async_context.copies, async_context.group) if async_context else (None, None)
    shapes = _saved_shapes(tensors, spec)
    save_checkpoint(
        target, tensors, documents, files, shapes=shapes, copies=copies, group=group, wrote=wrote, hold=hold
    )


def restore_run(checkpoint: Path, spec: ModelSpec, model: ModelParts, optimizer: Optimizer) -> TrainProgress:
    """Load model and optimizer in place; return the progress. Collective; raises one CheckpointError on all ranks."""
    _match_replicas(checkpoint, optimizer)
    tensors = state_tensors(model, optimizer)
    load_checkpoint(checkpoint, tensors, _saved_shapes(tensors, spec))
    position = run_on_rank0(lambda: read_position(checkpoint))
    restore_counters(position, model, optimizer)
    return position


def read_position(checkpoint: Path) -> TrainProgress:
    """Return the progress in a checkpoint. Raises CheckpointError."""
    try:
        return TrainProgress.from_document(read_document(checkpoint, POSITION))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint / POSITION}.json holds {error}") from error


def restore_counters(position: TrainProgress, model: ModelParts, optimizer: Optimizer) -> None:
    """Set what follows from the loaded tensors and the progress: counts of updates, and scales of fp8."""
    optimizer.set_step(position.num_updates)
    restore_float8(model)


def _match_replicas(checkpoint: Path, optimizer: Optimizer) -> None:
    """Prepare the outer steps for a checkpoint; raise CheckpointError if it has the states of other replicas."""
    saved, in_round = run_on_rank0(lambda: saved_replicas(read_tensor_index(checkpoint), WEIGHTS))
    outer = optimizer.outer
    replicas = 0 if outer is None else outer.replicas
    if saved != replicas:
        raise CheckpointError(
            f"{checkpoint} holds optimizer states of {_describe_replicas(saved)}, the run has "
            f"{_describe_replicas(replicas)}: continue with the replicas that saved it, or begin a new run with its "
            "weights (checkpoint.load_pretrained)"
        )
    if outer is not None:
        outer.in_round = in_round


def _describe_replicas(count: int) -> str:
    return f"{count} replicas that train apart (parallel.outer_steps)" if count else "no replicas that train apart"


def changed_overrides(checkpoint: Path, spec: RunSpec) -> list[str]:
    """Return a clause for each operator with another override than when a run saved a checkpoint; none if unknown."""
    if not (checkpoint / f"{OVERRIDES}.json").exists():  # of an older version
        return []
    before = read_document(checkpoint, OVERRIDES)
    entries = [entry for entry in before if isinstance(entry, str)] if isinstance(before, list) else []
    return override_changes(spec.platform.overrides, entries)
