"""Load the training state with which a run starts: of its newest checkpoint, of another run, or initial weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.load_pretrained import load_pretrained, require_valid, save_source_files
from megalaunch.engine.checkpoint.retention import latest_valid_checkpoint, remove_leftovers, require_never_saved
from megalaunch.engine.checkpoint.verify_config import describe_verification
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.train.checkpointer import Checkpointer, changed_overrides, restore_run, tokenizer_vocab_size
from megalaunch.engine.train.local_checkpointer import LocalCheckpointer
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.rundir.checkpoint.listing import newest_step
from megalaunch.rundir.paths import RunDirectory, checkpoint_step
from megalaunch.schema import RunSpec


class RunStart:
    """Loads into the model and optimizer of one rank. Every method is collective, and raises on all ranks or on none.

    Args:
        spec: The run spec.
        directory: The run directory.
        model: The model, without weights.
        optimizer: Its optimizer.
        record: Log writer of this rank.
        saver: The checkpoints in the run directory.
        local: Those in the memory and on the disks of the nodes.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        model: ModelParts,
        optimizer: Optimizer,
        record: RunLogger,
        saver: Checkpointer,
        local: LocalCheckpointer,
    ) -> None:
        self._spec, self._directory, self._model, self._optimizer = spec, directory, model, optimizer
        self._record, self._saver, self._local = record, saver, local
        self._rejected: list[str] = []  # rejected checkpoints, each with its problems; filled on rank 0

    def load(self) -> TrainProgress:
        """Load the newest valid checkpoint, in the run directory or local; without any, what the settings name.

        Raises:
            CheckpointError: All saved checkpoints are damaged or gone.
        """
        newest = run_on_rank0(partial(newest_step, self._directory.checkpoints))
        position = self._load_local(newest)
        if position is not None:
            return position
        found = self.find()
        valid = 0 if found is None else checkpoint_step(found) or 0
        if valid < newest and (position := self._load_local(valid)) is not None:
            return position
        if found is None:  # check before files are removed or truncated
            run_on_rank0(
                partial(require_never_saved, self._directory.checkpoints, self._rejected, self._record.last_saved)
            )
        self._remove_leftovers()
        if found is not None:
            position = self.restore(found)
            self._record.event("resumed", step=position.step, checkpoint=str(found))
            if changes := run_on_rank0(partial(changed_overrides, found, self._spec)):
                self._record.event("overrides_changed", step=position.step, changes=changes)
            return position
        if self._spec.checkpoint.branch_from is not None:
            return self._branch_from(Path(self._spec.checkpoint.branch_from))
        self._load_initial_weights()
        return TrainProgress(step=0, tokens=0)

    def find(self, step: int = 0, until: int | None = None) -> Path | None:
        """Return the newest valid checkpoint in the run directory, or None.

        Args:
            step: The last finished step, for reports of progress.
            until: The highest step of the checkpoint; None: any.
        """
        read = partial(self._record.io_progress, "checking checkpoints", step)
        return latest_valid_checkpoint(self._directory.checkpoints, self._reject, read, until)

    def restore(self, checkpoint: Path) -> TrainProgress:
        """Load the training state of a checkpoint of this run."""
        self._saver.saved = checkpoint
        self._record.phase("loading")
        position = restore_run(checkpoint, self._spec.model, self._model, self._optimizer)
        self._model.copy_embedding()
        return position

    def _load_local(self, after: int) -> TrainProgress | None:
        """Load the newest local checkpoint of a step after `after`, if there is one."""
        position = self._local.restore(after)
        if position is not None:
            self._remove_leftovers()
            self._model.copy_embedding()
        return position

    def _remove_leftovers(self) -> None:
        def remove() -> None:
            with self._record.fence.hold():
                remove_leftovers(self._directory.checkpoints)

        run_on_rank0(remove)

    def _branch_from(self, source: Path) -> TrainProgress:
        """Load the training state of another run. Raises CheckpointError on every rank if it is damaged or another."""
        self._record.phase("loading")
        run_on_rank0(partial(require_valid, source))
        num_tokens = run_on_rank0(partial(tokenizer_vocab_size, self._directory, self._spec))
        save_source_files(source, self._directory, num_tokens)
        position = restore_run(source, self._spec.model, self._model, self._optimizer)
        self._model.copy_embedding()
        self._record.event("resumed", step=position.step, checkpoint=str(source))
        return position

    def _load_initial_weights(self) -> None:
        """Load `checkpoint.load_pretrained` if it is set, else initialize the weights from `train.seed`."""
        source = self._spec.checkpoint.load_pretrained
        if source is None:
            init_weights(self._model, self._spec.train.seed)
            return
        self._record.phase("loading")
        num_tokens = run_on_rank0(partial(tokenizer_vocab_size, self._directory, self._spec))
        save_source_files(Path(source).expanduser(), self._directory, num_tokens)
        load_pretrained(Path(source).expanduser(), self._spec.model, self._model)
        self._model.copy_embedding()
        self._record.event("note", message=f"begins with the weights of {source}")
        reading = run_on_rank0(partial(describe_verification, Path(source).expanduser()))
        if reading is not None:
            self._record.event("note", message=reading)

    def _reject(self, path: Path, problems: list[str]) -> None:
        self._rejected.append(f"{path.name}: {'; '.join(problems)}")
        self._record.event("checkpoint_refused", path=str(path), reason="; ".join(problems))
