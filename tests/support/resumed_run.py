"""A run that saves and goes on, and one that loads the checkpoint and goes on, without launcher and loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from looped_run import prepared_directory
from oracle import SEQUENCE, rank_mesh, samples_of, whole

from megalaunch.engine.checkpoint.async_save import PinnedStaging
from megalaunch.engine.checkpoint.coordination import background_group
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model, materialize, parallelize_decoder
from megalaunch.engine.train.background_save import AsyncSaveContext
from megalaunch.engine.train.checkpointer import TrainProgress, restore_run, save_run, state_tensors
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import ForwardBackward, make_forward_backward
from megalaunch.engine.train.grads import finalize_grads
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.schema import RunSpec

SAVED, AFTER = 2, 3  # steps before the save, and after it


@dataclass
class Numbers:
    """What a run computes after the checkpoint: this stage's first gradients, and the losses."""

    gradients: dict[str, torch.Tensor]
    losses: list[float]


class Run:
    """One rank's part of a run under some layout, without launcher, files of tokens and loop."""

    def __init__(self, spec: RunSpec, loads: bool = False) -> None:
        self.spec = spec
        self.mesh: Mesh = rank_mesh(spec)
        if loads:  # uninitialised memory, as in a resume
            self.model = parallelize_decoder(spec, self.mesh)
            materialize(self.model, self.mesh)
        else:
            self.model = build_sharded_model(spec, self.mesh)
        self.optimizer = Optimizer(self.model, spec.optimizer, spec.precision)
        self.forward_backward: ForwardBackward = make_forward_backward(spec, self.mesh, self.model)
        samples = samples_of(spec)
        self.batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, self.mesh), self.mesh.device)
        self.step = TrainStep(spec, self.mesh, self.model, self.forward_backward, self.optimizer, samples)

    def steps(self, numbers: range) -> list[float]:
        """Train these steps; their losses."""
        return [self.step.run(number, self.batches.get(number, numbers[-1])).loss for number in numbers]

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """Every whole gradient of a step that is not made."""
        self.forward_backward.train(self.batches.get(number, number), self.spec.batch.global_batch_size * SEQUENCE)
        finalize_grads(self.model, self.mesh, self.spec.parallel.sequence_parallel)
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = whole(name, parameter.grad, self.spec)
            parameter.grad = None
        return found

    def after(self) -> Numbers:
        """The numbers after the checkpoint."""
        return Numbers(self.gradients(SAVED + 1), self.steps(range(SAVED + 1, SAVED + AFTER + 1)))


def saved_and_gone_on(spec: RunSpec, root: Path, beside: bool) -> Numbers:
    """Train, save, and go on as if nothing had been saved."""
    directory, run = prepared_directory(spec, root), Run(spec)
    run.steps(range(1, SAVED + 1))
    tensors, position = state_tensors(run.model, run.optimizer), TrainProgress(SAVED, 0)
    threads = AsyncSaveContext(PinnedStaging().stage(tensors), background_group()) if beside else None
    save_run(directory, spec, tensors, position, lambda done, total: None, threads)
    return run.after()


def loaded(spec: RunSpec, checkpoint: Path) -> Numbers:
    """Load into a model that has no weights yet, and go on."""
    run = Run(spec, loads=True)
    assert restore_run(checkpoint, spec.model, run.model, run.optimizer).step == SAVED
    run.model.copy_embedding()
    return run.after()


def loaded_states(spec: RunSpec, checkpoint: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Load into a model that has no weights yet; the dtype and the whole values of every state of this stage."""
    run = Run(spec, loads=True)
    restore_run(checkpoint, spec.model, run.model, run.optimizer)
    states = state_tensors(run.model, run.optimizer)
    return {name: (str(tensor.dtype), whole(name, tensor, spec).float()) for name, tensor in states.items()}
