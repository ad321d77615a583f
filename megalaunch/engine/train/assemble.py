"""From a run spec to everything a loop works on: mesh, sharded model, optimizer, data."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.gpt_samples import GPTSamples
from megalaunch.data.source import open_training, open_validation
from megalaunch.data.validation_samples import ValidationSamples
from megalaunch.engine.ending import Problem
from megalaunch.engine.families.registry import build_decoder
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import initialise
from megalaunch.engine.parallel.data import shard
from megalaunch.engine.precision.policy import sharding_policy
from megalaunch.engine.train.agreement import end_together
from megalaunch.engine.train.loop import Trainee
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.rundir.outcome import ExitCode


def assemble(spec: RunSpec, mesh: Mesh) -> Trainee:
    """Build and open everything; raises an Ending on every rank when any cannot open the tokens. Collective."""
    model = sharded_model(spec, mesh)
    training, validation = _open_tokens(spec, model.config.vocab_size)
    return Trainee(spec, mesh, model, NamedAdamW(model, spec.optimizer), training, validation)


def sharded_model(spec: RunSpec, mesh: Mesh) -> Decoder:
    """The initialised model, laid out over the mesh: built on meta, so that no rank ever holds more than its part."""
    with torch.device("meta"):
        model = build_decoder(spec.model)
    shard(model, mesh, spec.parallel.data_sharding, sharding_policy(spec.precision))
    model.to_empty(device=mesh.device)
    model.tie()
    initialise(model, spec.train.seed)
    return model


def _open_tokens(spec: RunSpec, vocab_size: int) -> tuple[GPTSamples, ValidationSamples | None]:
    opened, problem, length = None, None, spec.batch.sequence_length
    try:
        training = open_training(spec.data, length, spec.train.seed, vocab_size)
        opened = training, open_validation(spec.data, length, vocab_size)
    except (DataError, OSError) as error:
        problem = Problem(ExitCode.DATA, str(error))
    end_together(problem, step=0)
    assert opened is not None, "a rank with a problem does not come here"
    return opened
