"""A device beside the processor that needs no hardware: tensors say that they lie on it, and nothing mixes the two.

Fake tensors have shapes, formats and devices and no values. An operator that meets tensors of both devices raises
`FakeTensorDeviceMismatchError`, as CUDA would, so that whatever was made on the processor by mistake is found by
running the engine once. The device is registered for good: use it in a forked rank only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megalaunch.engine.inference.generate import next_logits
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.dropout import sample_seeds
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import TensorReaders, materialize, parallelize_decoder
from megalaunch.engine.parallel.step_observer import NO_OBSERVER
from megalaunch.engine.precision.policy import residual_dtype
from megalaunch.engine.simulate.step import full_length_documents, make_batch, make_observed_step
from megalaunch.engine.torch_private import READ_SCALAR
from megalaunch.engine.train.loss import LinearCrossEntropy
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.topology import Topology
from megalaunch.platform import plugins
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.schema import RunSpec

NAME = "second"


def register() -> torch.device:
    """Make torch know the device, once a process: streams and events are those of the processor, which do nothing."""
    streams = {name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")}
    module = SimpleNamespace(**streams, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None)
    module.current_device = lambda: 0
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=module)
    facts = PlatformFacts(NAME, "none", "megalaunch.engine.platform.platform:Platform")
    plugins.plugins = lambda: (plugins.PlatformPlugin(facts),)  # type: ignore[assignment]
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` makes one on the processor, then moves it
    return torch.device(NAME, 0)


class _FakeThere(TorchDispatchMode):
    """Only what is made on the second device is fake: device meshes are searched, and need their values."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is None or torch.device(device).type != NAME:
            return function(*args, **(kwargs or {}))
        with self._fake:
            return function(*args, **kwargs)


class _FakeScalars(TorchDispatchMode):
    """`.item()` of a fake tensor returns 0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0 if function is READ_SCALAR else function(*args, **(kwargs or {}))


@contextmanager
def _laid_out_on(device: torch.device, spec: RunSpec, rank: int) -> Iterator[tuple[Mesh, ModelParts]]:
    """One rank's part of a model on the device, in a group without peers; within, what is made is fake."""
    topology, fake = Topology.from_spec(spec), FakeTensorMode(allow_non_fake_inputs=True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world)
    mesh = make_mesh(topology, device, rank)
    _ = mesh.tp, mesh.pp, mesh.cp, mesh.cp_hierarchy  # made with real tensors, like meshes
    with _FakeThere(fake):
        model = parallelize_decoder(spec, mesh, readers=TensorReaders(full_length_documents))
    one_thread = torch.autograd.set_multithreading_enabled(False)  # torch's engine has no thread for this device
    with fake, _FakeScalars(), one_thread:
        materialize(model, mesh)
        yield mesh, model


def forward_on(device: torch.device, spec: RunSpec, rank: int) -> list[Tensor]:
    """The forward pass of each stage of one rank, in a group without peers: losses, and what goes to the next stage.

    Raises FakeTensorDeviceMismatchError where tensors of two devices meet.
    """
    with _laid_out_on(device, spec, rank) as (mesh, model):
        batch = make_batch(spec, mesh, 1)
        microbatch = batch.microbatches[0].map(lambda part: part.to(device))
        inputs = {name: value for name, value in microbatch.inputs.items() if name != "tokens"}
        streams = sample_seeds(spec.train.seed, batch.indices[0], device) if model.config.needs_seeds else None
        found = []
        for part in model.parts:
            loss = LinearCrossEntropy(part, count_loss_chunks(spec))
            x = microbatch.tokens
            if part.embedding is None:
                shape = (len(x), part.tp_region.local_seq_len(x.shape[1]), spec.model.hidden_size)
                x = torch.empty(shape, dtype=residual_dtype(spec.precision), device=device)
            output = part(x, **inputs, logits=loss.takes_logits, seeds_B=streams)
            found.append(output if part.head is None else loss(output, microbatch.labels))
        return found


def step_on(device: torch.device, spec: RunSpec, rank: int) -> None:
    """A whole training step: forward, backward, sums over ranks, clipping, update."""
    with _laid_out_on(device, spec, rank) as (mesh, model):
        step = make_observed_step(spec, mesh, model, Optimizer(model, spec.optimizer, spec.precision), NO_OBSERVER)
        batch = make_batch(spec, mesh, mesh.topology.microbatches)
        moved = tuple(one.map(lambda part: part.to(device)) for one in batch.microbatches)
        step.run(1, replace(batch, microbatches=moved))


def generate_on(device: torch.device, spec: RunSpec) -> list[Tensor]:
    """Logits after prompts of unlike length, then after one more token of each."""
    with torch.device("meta"):
        decoder = build_decoder(spec.model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = decoder.to_empty(device=device)
        model.tie()
        cache = KVCache(model.config.num_layers, 8, (0, 2))
        return [next_logits(model, torch.tensor(tokens), cache) for tokens in ([[1, 2, 3], [0, 0, 4]], [[5], [6]])]
