"""Trackers by their own packages: TensorBoard, Weights & Biases, MLflow, OpenTelemetry.

Keys and addresses come from the environment, as these packages read it; none is in the spec or in a log. Without an
address or a key a tracker writes into the run directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megalaunch.fs import make_directory
from megalaunch.launch.trackers.prometheus import PrometheusEndpoint, PrometheusTextfile
from megalaunch.launch.trackers.tracker import Tracker
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at


def open_tracker(name: str, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> Tracker:
    """Open a tracker by its name in `logging.trackers`, or of Prometheus; `run_id` is that of an earlier launch."""
    if name == "opentelemetry":  # its module imports the package
        from megalaunch.launch.trackers.spans import OpenTelemetryTracker

        return OpenTelemetryTracker(spec, directory, run_id)
    tracker: Tracker = _TRACKERS[name](spec, directory, run_id)
    return tracker


class TensorBoardTracker(Tracker):
    """Event files in `tensorboard/`, which `tensorboard --logdir` shows."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = "tensorboard"
        make_directory(directory.tensorboard)
        self._writer = EventFileWriter(str(directory.tensorboard))

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Add an event with a scalar for each figure."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))

    def finish(self) -> None:
        """Write the events to disk."""
        self._writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases: online with a key (WANDB_API_KEY, `wandb login`), else offline below `trackers/`."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        import wandb

        has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").is_file()
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        make_directory(directory.trackers)
        self._run = wandb.init(
            project=spec.logging.tracker_project,
            name=spec.run.name,
            id=run_id,
            resume="allow",
            dir=str(directory.trackers),
            config=_settings(spec),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        self.run_id = str(self._run.id)

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Log a row of the run's history."""
        self._run.log(figures, step=step)

    def finish(self) -> None:
        """Wait until the rows are uploaded, or written to the offline folder."""
        self._run.finish()


class MlflowTracker(Tracker):
    """A run of MLflow: on the server of MLFLOW_TRACKING_URI, else in a database below `trackers/`."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        from mlflow.tracking import MlflowClient

        make_directory(directory.trackers)
        local = f"file:{(directory.trackers / 'mlflow').absolute()}"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        if run_id is None:
            name = spec.logging.tracker_project
            experiment = self._client.get_experiment_by_name(name)
            identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(identity, run_name=spec.run.name).info.run_id
            for key, value in _settings(spec).items():
                self._client.log_param(run_id, key, str(value)[:500])
        else:
            self._client.update_run(run_id, "RUNNING")
        self.run_id = run_id

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Log a metric for each figure, in one request."""
        from mlflow.entities import Metric

        now = int(seconds * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def finish(self) -> None:
        """Mark the run as finished; a later launch sets it to running again."""
        self._client.set_terminated(self.run_id)


def _settings(spec: RunSpec) -> dict[str, Any]:
    """Return the settings of a run by dotted key; the spec has no secrets."""
    found = {path: value_at(spec, path) for path, _, _ in leaves(type(spec))}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


_TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "prometheus": PrometheusTextfile,
    "prometheus_endpoint": PrometheusEndpoint,
}
