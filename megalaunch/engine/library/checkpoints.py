"""Save and load the training state in the format of a run: every layout reads it, `convert` and `generate` too."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.load_pretrained import load_pretrained as load_weights
from megalaunch.engine.checkpoint.load_pretrained import require_valid
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.train.checkpointer import restore_run, save_state, state_tensors
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.fs import write_file_atomically
from megalaunch.rundir.checkpoint.contents import POSITION, SPEC_FILE, TOKENIZER_FILE
from megalaunch.rundir.checkpoint.manifest import MANIFEST
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import write_spec


def save(
    directory: Path | str, spec: RunSpec, model: ModelParts, optimizer: Optimizer, progress: TrainProgress
) -> None:
    """Save weights, optimizer states and progress as the checkpoint `directory`, complete or not at all. Collective.

    Raises:
        CheckpointError: The same on every rank; an older checkpoint of that name is unchanged.
    """
    with TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as folder:
        files = {SPEC_FILE: Path(folder) / SPEC_FILE}
        if dist.get_rank() == 0:
            write_spec(spec, files[SPEC_FILE])
        if spec.tokenizer.path is not None:
            files[TOKENIZER_FILE] = Path(folder) / TOKENIZER_FILE
            if dist.get_rank() == 0:
                write_file_atomically(files[TOKENIZER_FILE], load_tokenizer(Path(spec.tokenizer.path)).to_json())
        save_state(Path(directory), spec.model, state_tensors(model, optimizer), progress, files)


def load(directory: Path | str, spec: RunSpec, model: ModelParts, optimizer: Optimizer) -> TrainProgress:
    """Load a checkpoint that was saved under any layout, in place; return its progress. Collective.

    Raises:
        CheckpointError: The same on every rank: it names damaged files, or lists every difference between checkpoint
            and model.
    """
    source = Path(directory)
    run_on_rank0(partial(_require_training_state, source))
    progress = restore_run(source, spec.model, model, optimizer)
    model.copy_embedding()
    return progress


def load_pretrained(source: Path | str, spec: RunSpec, model: ModelParts) -> None:
    """Load weights from a Hugging Face folder, a checkpoint or a run directory, in place. Collective.

    Rows beyond the source's vocabulary are filled with zeros.

    Raises:
        CheckpointError: The same on every rank: it lists every difference between the two models.
    """
    load_weights(Path(source), spec.model, model)
    model.copy_embedding()


def _require_training_state(checkpoint: Path) -> None:
    """Raise CheckpointError for what is no checkpoint, is damaged, or holds weights alone."""
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointError(f"{checkpoint} is not a checkpoint: {MANIFEST} is missing")
    require_valid(checkpoint)
    if not (checkpoint / f"{POSITION}.json").exists():
        raise CheckpointError(f"{checkpoint} has weights but no training state: load it by load_pretrained")
