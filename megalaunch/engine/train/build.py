"""Build the training state from a run spec: sharded model, forward and backward passes, optimizer, data sets."""

from __future__ import annotations

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
from megalaunch.data.samples.sample import Dataset
from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.parallel.parallelize import materialize, parallelize_decoder
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.trainer import TrainState
from megalaunch.rundir.outcome import ExitCode


def build_train_state(spec: RunSpec, mesh: Mesh) -> TrainState:
    """Build the training state without weights, which `Trainer.resume` initializes or loads. Collective.

    Raises:
        RunEnd: On every rank, if any rank cannot open its data.
    """
    model = parallelize_decoder(spec, mesh)
    materialize(model, mesh)
    training, validation = _open_datasets(spec)
    return TrainState(
        spec,
        mesh,
        model,
        make_forward_backward(spec, mesh, model),
        NamedAdamW(model, spec.optimizer),
        training,
        validation,
    )


def _open_datasets(spec: RunSpec) -> tuple[Dataset, FiniteDataset | None]:
    opened, problem = None, None
    try:
        opened = build_train_dataset(spec), build_valid_dataset(spec)
    except (DataError, OSError) as error:
        problem = RankError(ExitCode.DATA, str(error))
    raise_on_all_ranks(problem, step=0)
    assert opened is not None, "a rank with a problem does not come here"
    return opened
