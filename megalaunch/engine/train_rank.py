"""The body of a training rank: build the state, resume, train, generate a sample."""

from __future__ import annotations

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.inference.sample_prompt import sample_text
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.backends import RUN_KERNELS
from megalaunch.engine.parallel.pipeline_forward import DistributedGenerator
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.forward_backward import make_pipeline_forward
from megalaunch.engine.train.network_check import check_network
from megalaunch.engine.train.rank_sync import all_gather_objects
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.trainer import Trainer, TrainState, build_train_state
from megalaunch.engine.train.validator import TaskEvaluator
from megalaunch.engine.worker_setup import StopSignal, tune_malloc
from megalaunch.plan.attention_choice import describe_backend, taken_backends
from megalaunch.plan.overrides import override_changes, override_entries
from megalaunch.platform.overrides import active_overrides
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import with_value


def train(spec: RunSpec, mesh: Mesh, directory: RunDirectory, record: RunLogger, stop: StopSignal) -> RunEnd:
    """Train one rank, from the newest checkpoint or initial weights to the end (`RankEntrypoint`). Collective."""
    if not platform_of(mesh.device).has_streams:  # tensors are in the memory of the process
        tune_malloc()
    active = record_overrides(mesh.device.type, record)
    if changes := override_changes(active, spec.platform.overrides):
        record.event("note", message=f"overrides differ from those of the launcher: {'; '.join(changes)}")
    spec = with_value(spec, {"platform.overrides": active})  # what checkpoints record
    check_network(spec, mesh, record)
    state = build_train_state(spec, mesh)
    record.event("attention", backend=spec.model.attention_backend, kernel=_attention_kernel(spec))
    loop = Trainer(state, directory, record, stop, open_tasks(state, directory))
    try:
        loop.resume()
        ending = loop.run()
    except CheckpointError as error:  # the same on every rank
        raise RunEnd(error.exit_code, str(error), loop.step) from error
    is_last = loop.step >= spec.train.steps or ending.details.get("early_stopped")
    if ending.exit_code == ExitCode.DONE and is_last:
        _generate_final_sample(state, directory, record)
    return ending


def _attention_kernel(spec: RunSpec) -> str:
    """Return which kernel of attention a run takes, and why; of a package also its version."""
    loaded = [RUN_KERNELS[name]().description for name in sorted(taken_backends(spec).all & RUN_KERNELS.keys())]
    return ", ".join((*loaded, describe_backend(spec)))


def record_overrides(device: str, record: RunLogger) -> tuple[str, ...]:
    """Record the overrides of a device type, and return them as `platform.overrides`.

    Collective: ranks with different ones would compute different values.

    Raises:
        RunEnd: Another rank's packages replace something else.
    """
    active = active_overrides(device)
    everywhere = all_gather_objects({target: str(row) for target, row in active.items()})
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            reason = f"overrides differ: {everywhere[0]} on rank 0 and {other} on rank {rank}; "
            reason += "install the same packages on every node"
            raise RunEnd(ExitCode.CONFIGURATION, reason, 0)
    for row in active.values():
        record.event("override", operator=row.target, implementation=row.implementation, vendor=row.vendor)
    return override_entries(active)


def open_tasks(state: TrainState, directory: RunDirectory) -> TaskEvaluator | None:
    """Load the tasks of `train.eval_tasks`; None without tasks. Raises a RunEnd on every rank if they are missing."""
    if not state.spec.train.eval_tasks.names:
        return None
    from megalaunch.engine.training_tasks import TrainingModelTasks  # importing lm-eval takes seconds

    return TrainingModelTasks(state, directory)


def _generate_final_sample(state: TrainState, directory: RunDirectory, record: RunLogger) -> None:
    """Generate `train.sample_prompt`'s continuation. Failures are only logged: the model is trained and saved."""
    spec = state.spec
    if not spec.train.sample_prompt or spec.tokenizer.path is None:
        return
    record.phase("sampling")
    tokenizer, missing = None, None
    try:
        tokenizer = load_tokenizer(directory.tokenizer)
    except DataError as error:
        missing = str(error)
    reasons = [reason for reason in all_gather_objects(missing) if reason]
    if tokenizer is None or reasons:
        record.event("note", message=f"no sample was written: {reasons[0]}")
        return
    try:
        record.sample(sample_text(spec, _as_generator(state), tokenizer))
    except ValueError as error:  # the same on every rank
        record.event("note", message=f"no sample was written: {error}")


def _as_generator(state: TrainState) -> DistributedGenerator:
    forward_only = make_pipeline_forward(state.spec, state.mesh, state.model)
    return DistributedGenerator(state.model, state.mesh, forward_only)
