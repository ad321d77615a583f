"""Save and load the training state in the format of a run: every layout reads it, `convert` and `generate` too."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.train.checkpointer import restore_run, save_state, state_tensors
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.fs import write_file_atomically
from megalaunch.rundir.checkpoint.contents import SPEC_FILE, TOKENIZER_FILE
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import write_spec


def save(directory: Path, spec: RunSpec, model: ModelParts, optimizer: Optimizer, progress: TrainProgress) -> None:
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
        save_state(directory, spec.model, state_tensors(model, optimizer), progress, files)


def load(directory: Path, spec: RunSpec, mesh: Mesh, model: ModelParts, optimizer: Optimizer) -> TrainProgress:
    """Load a checkpoint that was saved under any layout, in place; return its progress. Collective.

    Raises:
        CheckpointError: The same on every rank: it lists every difference between checkpoint and model.
    """
    progress = restore_run(directory, spec.model, model, optimizer)
    model.copy_embedding()
    return progress
