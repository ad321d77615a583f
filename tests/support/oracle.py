"""The oracle of layout tests: the same model on one process in fp32, in plain torch, against a layout's numbers.

Tolerances of the design: every gradient to 1e-5 of its own largest value, the gradient norm to 1e-6, parameters
after three updates to 1e-5 of their largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_ranks import run_ranks
from plain_mtp import plain_mtp_loss
from plain_optimizers import plain_optimizer, set_weight_decay
from proofs import Proof, record

from megalaunch.data.samples.sample import Sample, positions_within
from megalaunch.engine.dtensor import copy_from_global_
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder, strip_vocab_padding
from megalaunch.engine.model.dropout import sample_seeds
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.model.init_value import init_value
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.platform.registry import get_platform
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.evaluate import validation_loss
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.batch import samples_of_step, schedule_position
from megalaunch.plan.topology import Topology
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec, build_run_spec

STEPS, WARMUP = 3, 2
Prepare = Callable[[Decoder | ModelParts], None]
"""Changes a model's initial weights."""
VOCABULARY, SEQUENCE = 61, 16  # tokens of an odd vocabulary; a length that context-parallel ranks can share


def small_spec(**values: object) -> RunSpec:
    """A resolved spec of a decoder with grouped queries; `values` by dotted path with `__` for the dot."""
    data = {
        "model": {
            "num_layers": 3,
            "hidden_size": 24,
            "ffn_hidden_size": 40,
            "num_attention_heads": 6,
            "num_query_groups": 2,
            "head_dim": 4,
            "vocab_size": VOCABULARY,
        },
        "parallel": {"dp": 1},
        "precision": {"compute_dtype": "fp32"},
        "platform": {"chip": "cpu"},
        "cluster": {"nodes": 1, "devices_per_node": 1},
        "optimizer": {"lr": 1e-3, "epsilon": 1e-5, "clip_grad": 0.5},
        "schedule": {"shape": "constant", "warmup_steps": WARMUP, "decay_steps": STEPS},
        "batch": {"sequence_length": SEQUENCE, "micro_batch_size": 2, "global_batch_size": 8},
        "train": {"steps": STEPS, "seed": 7},
    }
    for path, value in values.items():
        section, key = path.split("__")
        data.setdefault(section, {})[key] = value
    p = data["parallel"]
    data["cluster"]["devices_per_node"] = p["dp"] * p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
    return build_run_spec(data)


def few_samples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the fewest samples of a step that make two microbatches, or four for two stages; at most 8."""
    stages, replicas = values.get("parallel__pp", 1), values.get("parallel__dp", 1)
    microbatches = 2 * stages if stages > 1 else 2
    size = replicas * values.get("batch__micro_batch_size", 2) * microbatches
    return {"batch__global_batch_size": min(8, size), **values}


class RandomSamples:
    """Sample i is a fixed random row; a stand-in for the training order."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self._vocabulary = vocabulary

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.random.default_rng(index).integers(0, self._vocabulary, SEQUENCE + 1))

    def describe(self, index: int) -> str:
        return f"row {index}"


class PackedSamples(RandomSamples):
    """Rows of several documents each, of whose labels some do not count; in every fourth row none does."""

    def __getitem__(self, index: int) -> Sample:
        draws = np.random.default_rng(index)
        ends, counted = draws.random(SEQUENCE) < 0.2, draws.random(SEQUENCE) < 0.8
        documents = np.concatenate(([0], np.cumsum(ends[:-1])))
        tokens = super().__getitem__(index).tokens
        return Sample(tokens, counted & (index % 4 != 1), positions_within(ends), documents)


def samples_of(spec: RunSpec) -> RandomSamples:
    """What a spec is trained on here."""
    vocabulary = max(VOCABULARY, (spec.model.vocab_size or 0) - 3)  # more than 64 only where padding is tried
    return PackedSamples(vocabulary) if spec.data.reset_attention_mask else RandomSamples(vocabulary)


def labels_of(samples: RandomSamples, indices: range) -> int:
    """How many labels of these rows count."""
    rows = [samples[index] for index in indices]
    return sum(SEQUENCE if row.loss_mask is None else int(row.loss_mask.sum()) for row in rows)


class UnevenRows:
    """Validation rows of different numbers of valid tokens, one of them with none."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Sample:
        row = np.random.default_rng(100 + index).integers(0, VOCABULARY, SEQUENCE + 1)
        return Sample(row, np.arange(SEQUENCE) < 3 * index)


@dataclass
class Numbers:
    """Everything a layout is held to."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    validation: float


def one_process(spec: RunSpec, prepare: Prepare | None = None, modules: LayerModules = STANDARD_MODULES) -> Numbers:
    """The reference: no sharding, no accumulation, torch's own loss, clipping and optimizers."""
    model = build_decoder(spec.model, modules=modules)
    init_weights(model, spec.train.seed)
    if prepare is not None:
        prepare(model)
    optimizer = plain_optimizer(spec.optimizer, dict(model.named_parameters()))
    rows = samples_of(spec)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        indices = samples_of_step(spec, step + 1)
        streams = [_streams(spec, index) for index in indices]
        summed = (_plain_loss(model, rows[index], drawn) for index, drawn in zip(indices, streams, strict=True))
        loss = sum(summed) / labels_of(rows, indices)
        optimizer.zero_grad()
        (loss + plain_mtp_loss(spec, model, [rows[index] for index in indices])).backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_grad).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            first = spec.schedule.warmup_init_lr
            group["lr"] = first + (group["peak"] - first) * min(1, schedule_position(spec, step + 1) / WARMUP)
            set_weight_decay(group, spec.schedule, schedule_position(spec, step + 1))
        optimizer.step()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Numbers(losses, norms, gradients, parameters, _plain_validation(model))


def _streams(spec: RunSpec, index: int) -> torch.Tensor | None:
    """What the dropout of one sample is drawn from, where there is any."""
    drops = spec.model.hidden_dropout or spec.model.attention_dropout
    return sample_seeds(spec.train.seed, [index], torch.device("cpu")) if drops else None


def _plain_loss(model: torch.nn.Module, row: Sample, streams: torch.Tensor | None = None) -> torch.Tensor:
    """The summed loss of one row, each of its documents passed through the model alone (dropout: in no document)."""
    tokens = torch.from_numpy(row.tokens)
    documents = np.zeros(SEQUENCE, np.int64) if row.document_ids is None else row.document_ids
    pieces = np.split(np.arange(SEQUENCE), np.flatnonzero(np.diff(documents)) + 1)
    logits = torch.cat([model(tokens[None, :-1][:, piece], seeds_B=streams)[0] for piece in pieces])
    losses = F.cross_entropy(logits, tokens[1:], reduction="none")
    return losses.sum() if row.loss_mask is None else losses[torch.from_numpy(row.loss_mask)].sum()


def _plain_validation(model: torch.nn.Module) -> float:
    rows, total, count = UnevenRows(), 0.0, 0
    with torch.no_grad():
        for index in range(len(rows)):
            row = rows[index]
            total += _plain_loss(model, row).item()
            count += int(row.loss_mask.sum())
    return total / count


class _NotingOptimizer(Optimizer):
    """Keeps what the first update is made of: the whole gradients, summed over all ranks and not yet clipped."""

    def __init__(self, model: ModelParts, spec: RunSpec) -> None:
        super().__init__(model, spec.optimizer, spec.precision)
        self._model, self._spec = model, spec
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, rate: float, divisor: float, embedding_lr: float | None, weight_decay: float) -> None:
        """Update, after the note."""
        if not self.gradients:
            named = self._model.named_parameters()
            self.gradients = {name: whole(name, p.grad, self._spec) for name, p in named}
        super().step(rate, divisor, embedding_lr, weight_decay)


def device_type(spec: RunSpec) -> str:
    """The device type of a spec's chip: `run_ranks(..., device=)`."""
    return CHIPS[spec.platform.chip].device


def rank_mesh(spec: RunSpec) -> Mesh:
    """The mesh of this rank, on its device of the spec's platform."""
    rank = dist.get_rank()
    return make_mesh(Topology.from_spec(spec), get_platform(device_type(spec)).device(rank), rank)


def on_ranks(
    spec: RunSpec,
    every_stage: bool = False,
    prepare: Prepare | None = None,
    modules: LayerModules = STANDARD_MODULES,
) -> Numbers | None:
    """The same three steps by the engine on this rank of an initialised group; rank 0 (of each stage) answers."""
    mesh = rank_mesh(spec)
    numbers = on_mesh(spec, mesh, prepare, modules)
    speaks = mesh.rank == 0 or (every_stage and mesh.rank % (mesh.topology.world // mesh.pp.size) == 0)
    return numbers if speaks else None


def on_mesh(
    spec: RunSpec, mesh: Mesh, prepare: Prepare | None = None, modules: LayerModules = STANDARD_MODULES
) -> Numbers:
    """The same three steps by the engine on this rank of a mesh, on its device."""
    model = build_sharded_model(spec, mesh, modules)
    if prepare is not None:
        prepare(model)
    optimizer = _NotingOptimizer(model, spec)
    samples = samples_of(spec)
    sampler = make_batch_sampler(spec, mesh)
    batches = PrefetchingDataLoader(samples, sampler, mesh.device, mtp_depths=spec.model.mtp.num_layers)
    forward_backward = make_forward_backward(spec, mesh, model)
    step = TrainStep(spec, mesh, model, forward_backward, optimizer, samples)
    results = [step.run(number, batches.get(number, STEPS)) for number in range(1, STEPS + 1)]
    batches.close()
    validation = validation_loss(
        forward_backward, UnevenRows(), spec.batch.micro_batch_size or 1, mesh, lambda problem: True
    )
    assert validation is not None
    parameters = {name: whole(name, p.detach(), spec) for name, p in model.named_parameters()}
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return Numbers(losses, norms, optimizer.gradients, parameters, validation)


def hold_to_one_process(
    spec: RunSpec,
    prepare: Prepare | None = None,
    timeout: float = 120,
    modules: LayerModules = STANDARD_MODULES,
) -> None:
    """The layout's numbers by as many ranks as it takes, held to the reference of the same spec on a CPU."""
    world, device = spec.cluster.devices_per_node, device_type(spec)
    every = run_ranks(world, on_ranks, spec, True, prepare, modules, timeout=timeout, device=device)
    assert_same(joined_stages(every), _reference(_without_layout(spec), prepare, modules))


@lru_cache(maxsize=64)
def _reference(spec: RunSpec, prepare: Prepare | None, modules: LayerModules) -> Numbers:
    """The one process of many layouts, computed once: it costs as much as a rank."""
    if spec.platform.chip != "cpu":
        return run_ranks(1, one_process, spec, prepare, modules)[0]
    return one_process(spec, prepare, modules)


def _without_layout(spec: RunSpec) -> RunSpec:
    """The spec with nothing that only says where and when the same numbers are computed."""
    plain = small_spec()
    batch = replace(spec.batch, micro_batch_size=plain.batch.micro_batch_size)
    return replace(spec, batch=batch, **{name: getattr(plain, name) for name in ("parallel", "recompute", "cluster")})


def shake(model: Decoder | ModelParts) -> None:
    """Move biases and norms from the zeros and ones that they begin as, which would hide that one is missing."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            start = init_value(name, parameter.shape, model.config, 0)
            copy_from_global_(parameter, start + torch.empty(parameter.shape).uniform_(-0.3, 0.3, generator=generator))


def joined_stages(every: Iterable[Numbers | None]) -> Numbers:
    """What ranks told with `every_stage`: the first one's numbers, with the parameters of all stages."""
    first, *others = [numbers for numbers in every if numbers is not None]
    for other in others:
        first.gradients |= other.gradients
        first.parameters |= other.parameters
    return first


def whole(name: str, tensor: torch.Tensor | None, spec: RunSpec) -> torch.Tensor:
    """All of a parameter or gradient, without the rows that pad the vocabulary, which have to be zeros."""
    assert tensor is not None, "a parameter got no gradient"
    full = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).to("cpu", copy=True)
    rows = strip_vocab_padding(name, full.shape, spec.model.vocab_size or 0)[0] if full.ndim else 0
    assert not full.ndim or not full[rows:].any(), f"{name}: padded rows are not zero"
    return full[:rows] if full.ndim else full


def assert_same(found: Numbers, expected: Numbers) -> None:
    """Hold a layout's numbers to the oracle's, naming the first parameter that differs."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-6)
    np.testing.assert_allclose(found.validation, expected.validation, rtol=1e-6)
    # What is added to keys that are not rotated is 0 by definition to a softmax: rounding is all there is of its
    # gradient. Every other gradient is held to its own size.
    steepest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    nothing = {
        name: (gradient.abs() < 1e-6 * steepest) & name.endswith(("k_proj.bias", "k_norm.bias"))
        for name, gradient in expected.gradients.items()
    }
    worst = {}
    for kind in ("gradients", "parameters"):
        differences = _relative_differences(getattr(found, kind), getattr(expected, kind), nothing)
        for name, difference in differences.items():
            assert difference <= 1e-5, f"{kind} of {name}: off by {difference:.2e} of the largest, allowed 1e-5"
        worst[kind] = max(differences.values())
    record(
        Proof(
            gradients=worst["gradients"],
            norm=_relative(found.norms, expected.norms),
            parameters=worst["parameters"],
            validation=_relative([found.validation], [expected.validation]),
        )
    )


def _relative_differences(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], nothing: dict[str, torch.Tensor]
) -> dict[str, float]:
    """By name, the largest difference as a share of the tensor's largest value.

    Where `nothing` is to be found but rounding, a tenth of the largest value of all tensors takes its place.
    """
    assert found.keys() == expected.keys()
    tenth = max(value.abs().max().item() for value in expected.values()) / 10
    differences = {}
    for name, value in expected.items():
        own = max(value.abs().max().item(), torch.finfo(torch.float32).tiny)
        scale = torch.where(nothing[name], max(own, tenth), own)
        differences[name] = ((torch.as_tensor(found[name]) - value).abs() / scale).max().item()
    return differences


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(mine - reference) / abs(reference) for mine, reference in zip(found, expected, strict=True))
