"""Saved under one layout, loaded under another, drawn at random: the run goes on with the same numbers.

Six pairs; `pytest tests/ranks/test_checkpoint_pairs.py --pairs 20 --seed 7` tries others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import prepared_directory
from oracle import SEQUENCE, RandomSamples
from random_layouts import Layout, name_of, random_layouts, ranks_of, spec_of

from megalaunch.config.schema import RunSpec
from megalaunch.engine.checkpoint.beside import HostCopies
from megalaunch.engine.checkpoint.ranks import background_group
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.parallel.tied import renew_tied_head
from megalaunch.engine.train.assemble import sharded_model
from megalaunch.engine.train.batches import TrainBatches, batch_shape
from megalaunch.engine.train.finalize import finalize
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.passes import Passes, passes_of
from megalaunch.engine.train.saving import Beside, Position, restore_run, save_run, state_tensors
from megalaunch.engine.train.step import Step
from megalaunch.plan.topology import Topology

SAVED, AFTER = 2, 3  # steps before the save, and after it
TOLERANCE = 1e-5


@dataclass
class Numbers:
    """What a run computes after the checkpoint: this stage's first gradients, and the losses."""

    gradients: dict[str, torch.Tensor]
    losses: list[float]


class Run:
    """One rank's part of a run under some layout, without launcher, files of tokens and loop."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.mesh: Mesh = make_mesh(Topology.of(spec), torch.device("cpu"), dist.get_rank())
        self.model = sharded_model(spec, self.mesh)
        self.optimizer = NamedAdamW(self.model, spec.optimizer)
        self.passes: Passes = passes_of(spec, self.mesh, self.model)
        samples = RandomSamples()
        self.batches = TrainBatches(samples, batch_shape(spec.batch.global_batch_size, self.mesh), self.mesh.device)
        self.step = Step(spec, self.mesh, self.model, self.passes, self.optimizer, samples)

    def steps(self, numbers: range) -> list[float]:
        """Train these steps; their losses."""
        return [self.step.run(number, self.batches.of(number, numbers[-1]), None).loss for number in numbers]

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """Every whole gradient of a step that is not made."""
        self.passes.train(self.batches.of(number, number), self.spec.batch.global_batch_size * SEQUENCE)
        finalize(self.model, self.mesh, self.spec.parallel.sequence_parallel)
        found = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
            parameter.grad = None
        return found

    def after(self) -> Numbers:
        """The numbers after the checkpoint."""
        return Numbers(self.gradients(SAVED + 1), self.steps(range(SAVED + 1, SAVED + AFTER + 1)))


def saved_and_gone_on(spec: RunSpec, root: Path, beside: bool) -> Numbers:
    """Train, save, and go on as if nothing had been saved."""
    directory, run = prepared_directory(spec, root), Run(spec)
    run.steps(range(1, SAVED + 1))
    tensors, position = state_tensors(run.model, run.optimizer), Position(SAVED, 0)
    threads = Beside(HostCopies().take(tensors), background_group()) if beside else None
    save_run(directory, spec, tensors, position, lambda done, total: None, threads)
    return run.after()


def loaded(spec: RunSpec, checkpoint: Path) -> Numbers:
    """Load into a model that began with other weights, and go on."""
    run = Run(spec)
    assert restore_run(checkpoint, run.model, run.optimizer).step == SAVED
    renew_tied_head(run.model, run.mesh)
    return run.after()


def joined(ranks: int, *job: object) -> Numbers:
    """The gradients of all stages together; the losses are the same on all ranks."""
    every = run_ranks(ranks, *job, timeout=120)
    assert all(numbers.losses == every[0].losses for numbers in every)
    return Numbers({name: g for numbers in every for name, g in numbers.gradients.items()}, every[0].losses)


def pairs(count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts that differ; every second run has tied embeddings, on both sides."""
    found = []
    for number in range(count):
        tied = {"model__tied_embeddings": number % 2 == 1}
        layouts = random_layouts(seed + number, **tied)
        first = next(layouts)
        found.append((first, next(other for other in layouts if other != first)))
    return found


def pytest_generate_tests(metafunc):
    drawn = pairs(metafunc.config.getoption("pairs"), metafunc.config.getoption("seed"))
    names = [f"{name_of(first)} to {name_of(second)}" for first, second in drawn]
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize(("number", "pair"), list(enumerate(drawn)), ids=names)


def test_the_run_goes_on_under_another_layout(tmp_path, number, pair):
    first, second = pair
    expected = joined(ranks_of(first), saved_and_gone_on, spec_of(first), tmp_path, number % 3 == 0)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    found = joined(ranks_of(second), loaded, spec_of(second, train__seed=8), checkpoint)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, reference in expected.gradients.items():
        difference = (found.gradients[name] - reference).abs().max().item()
        assert difference <= TOLERANCE * reference.abs().max().item(), f"gradient of {name}: off by {difference:.2e}"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)


def test_layouts_are_drawn_from_all_kinds():
    layouts = list(islice(random_layouts(0), 60))
    assert layouts == list(islice(random_layouts(0), 60))
    for axis in ("dp", "pp", "cp", "tp"):
        assert {layout[f"parallel__{axis}"] for layout in layouts} == {1, 2, 4}
    assert len({layout.get("parallel__schedule") for layout in layouts}) > 5
    assert len({layout["parallel__data_sharding"] for layout in layouts}) == 4
    assert any(layout.get("parallel__replicas") == 2 for layout in layouts)
