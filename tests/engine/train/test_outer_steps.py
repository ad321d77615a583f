"""Outer steps: replicas that train apart and average what they learned, against the same sums on one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from oracle import (
    WARMUP,
    _plain_loss,
    _relative_differences,
    labels_of,
    one_process,
    rank_mesh,
    samples_of,
    small_spec,
    whole,
)
from plain_optimizers import plain_optimizer
from slow_cases import slow_but

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.optimizer.build import build_optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.batch import samples_of_step, schedule_position
from megalaunch.schema import RunSpec

PACKED = {"data__reset_attention_mask": True}  # documents with other numbers of labels, in some rows none
APART = {
    "train__steps": 5,
    "parallel__outer_steps": 3,
    "parallel__data_sharding": "no_shard",
    "model__num_layers": 2,
    **PACKED,
}

ZERO0 = {"dp": 2, "data_sharding": "no_shard"}


@dataclass
class Trained:
    """What a run is held to."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def train_on_ranks(spec: RunSpec) -> Trained:
    """Train the steps of a spec by the engine; parameters are those of this rank's stage and replica."""
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    samples, optimizer = samples_of(spec), build_optimizer(spec, mesh, model)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    last = spec.train.steps
    results = [step.run(number, batches.get(number, last)) for number in range(1, last + 1)]
    batches.close()
    parameters = {name: whole(name, p.detach(), spec) for name, p in model.named_parameters()}
    return Trained([r.loss for r in results], [r.grad_norm for r in results], parameters)


def train_on_one_process(spec: RunSpec, replicas: int) -> Trained:
    """The same by plain torch: one model after the other, and torch's SGD with Nesterov momentum for outer steps."""
    p, rows = spec.parallel, samples_of(spec)
    outer = build_decoder(spec.model)
    init_weights(outer, spec.train.seed)
    models = [build_decoder(spec.model) for _ in range(replicas)]
    optimizers = [plain_optimizer(spec.optimizer, dict(model.named_parameters())) for model in models]
    rule = torch.optim.SGD(outer.parameters(), p.outer_lr, p.outer_momentum, nesterov=p.outer_momentum > 0)
    found = Trained([], [], {})
    for step in range(1, spec.train.steps + 1):
        indices = samples_of_step(spec, step)
        mean_labels = labels_of(rows, indices) / replicas
        losses, norms = [], []
        if step == 1:
            _copy_to(models, outer)
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = [index for index in indices if (index - indices.start) * replicas // len(indices) == replica]
            loss = sum(_plain_loss(model, rows[index]) for index in mine) / mean_labels
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_grad or 1e9).item())
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1, schedule_position(spec, step) / WARMUP)
            optimizer.step()
            losses.append(loss.item())
        found.losses.append(sum(losses) / replicas)
        found.norms.append(max(norms))
        if step % p.outer_steps == 0 or step == spec.train.steps:
            for weight, *trained in zip(outer.parameters(), *(m.parameters() for m in models), strict=True):
                weight.grad = torch.stack([weight - each for each in trained]).mean(0).detach()
            rule.step()
            _copy_to(models, outer)
    found.parameters = {name: p.detach().clone() for name, p in outer.named_parameters()}
    return found


@torch.no_grad()
def _copy_to(models: list[torch.nn.Module], outer: torch.nn.Module) -> None:
    for model in models:
        for mine, weight in zip(model.parameters(), outer.parameters(), strict=True):
            mine.copy_(weight)


def assert_same(found: Trained, expected: Trained) -> None:
    """Hold losses, norms and every parameter to the reference."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    nothing = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in expected.parameters.items()}
    differences = _relative_differences(found.parameters, expected.parameters, nothing)
    assert max(differences.values()) <= 1e-5, differences


@pytest.mark.parametrize("layout", slow_but([ZERO0, {"dp": 4, "dp_replicate": 2}], ZERO0, every=()))
def test_averaging_after_every_step_of_sgd_is_data_parallelism(layout):
    """The mean of the replicas' updates is then the update by the mean gradient."""
    plain = {"optimizer__name": "sgd", "optimizer__clip_grad": 0.0, "batch__micro_batch_size": 1, **PACKED}
    outer = {"outer_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0, **layout}
    spec = small_spec(**plain, **{f"parallel__{key}": value for key, value in outer.items()})
    (first, *_, last) = run_ranks(spec.parallel.dp, train_on_ranks, spec)
    expected = one_process(small_spec(**plain | {"optimizer__clip_grad": 1e9}))
    first.norms = expected.norms  # theirs are of half the batch each
    for replica in (first, Trained(first.losses, expected.norms, last.parameters)):
        assert_same(replica, Trained(expected.losses, expected.norms, expected.parameters))


LAYOUTS = {
    "zero0": {"dp": 2},
    "zero0 of four": {"dp": 4},
    "tp2 sp": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"dp": 2, "pp": 2, "schedule": "1f1b"},
    "cp2": {"dp": 2, "cp": 2},
    "hsdp2 zero1": {"dp": 4, "dp_replicate": 2, "data_sharding": "optim"},
    "hsdp2 zero2": {"dp": 4, "dp_replicate": 2, "data_sharding": "optim_grads"},
    "hsdp2 zero2 muon": {"dp": 4, "dp_replicate": 2, "data_sharding": "optim_grads"},
    "hsdp2 zero3": {"dp": 4, "dp_replicate": 2, "data_sharding": "optim_grads_params"},
}

DAILY = ["tp2 sp", "pp2", "hsdp2 zero2 muon"]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "zero0", every=DAILY))
def test_every_layout_of_replicas_equals_one_process(layout):
    values = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    tied, name = "pp" in layout, "muon" if "muon" in layout else "adamw"
    values |= {"model__tie_word_embeddings": tied, "optimizer__name": name, "optimizer__nesterov": name == "muon"}
    spec = small_spec(**APART | values, batch__micro_batch_size=1)
    p = spec.parallel
    replicas = p.dp if p.data_sharding == "no_shard" else p.dp_replicate
    ranks = run_ranks(spec.cluster.devices_per_node, train_on_ranks, spec)
    expected = train_on_one_process(spec, replicas)
    for rank in ranks:  # every replica has the outer weights in the end
        there = {name: value for name, value in expected.parameters.items() if name in rank.parameters}
        assert_same(rank, Trained(expected.losses, expected.norms, there))
    assert set().union(*(rank.parameters for rank in ranks)) == set(expected.parameters)
