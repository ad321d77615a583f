"""From a run spec to everything a loop works on: mesh, sharded model, optimizer, data."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.source import open_training, open_validation
from megalaunch.engine.families.registry import build_decoder
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import initialise
from megalaunch.engine.parallel.data import shard
from megalaunch.engine.precision.policy import sharding_policy
from megalaunch.engine.train.loop import Trainee
from megalaunch.engine.train.optimizer import NamedAdamW


def assemble(spec: RunSpec, mesh: Mesh) -> Trainee:
    """Build on meta, shard, give memory, initialise; raises DataError when the tokens cannot be read."""
    vocabulary, length = spec.model.vocab_size or 0, spec.batch.sequence_length
    training = open_training(spec.data, length, spec.train.seed, vocabulary)
    validation = open_validation(spec.data, length, vocabulary)
    model = sharded_model(spec, mesh)
    return Trainee(spec, mesh, model, NamedAdamW(model, spec.optimizer), training, validation)


def sharded_model(spec: RunSpec, mesh: Mesh) -> Decoder:
    """The initialised model, laid out over the mesh. No rank ever holds more than its part."""
    with torch.device("meta"):
        model = build_decoder(spec.model)
    shard(model, mesh, spec.parallel.data_sharding, sharding_policy(spec.precision))
    model.to_empty(device=mesh.device)
    model.tie()
    initialise(model, spec.train.seed)
    return model
