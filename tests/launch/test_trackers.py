"""Trackers: fed from the run's files, by processes whose failures training does not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from launching import running, wait_until
from tracked_run import directory_of, one_worker
from training import train_tiny

from megalaunch.launch.run_state import ThroughputBasis
from megalaunch.launch.trackers import __main__ as feeding
from megalaunch.launch.trackers.figures import event_figures, step_figures
from megalaunch.launch.trackers.process import trackers
from megalaunch.launch.trackers.prometheus import PrometheusTextfile
from megalaunch.process import descendants
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line, keep_lines, read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values

CANARY = "k" * 40  # a key of wandb has 40 characters


def add_steps(directory: RunDirectory, *steps: int) -> None:
    for step in steps:
        append_line(
            directory.metrics, {"step": step, "loss": 1.0 / step, "step_seconds": 0.5, "moe_load_max": [1.5, 2]}
        )


class Fake:
    """A tracker that remembers what it got, and fails as often as it is asked to."""

    run_id = "there"
    failures = 0

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError(f"no answer from https://user:{CANARY}@host")
        self.got.append((step, figures))

    def log_event(self, record: dict[str, object]) -> None:
        self.events.append(str(record["event"]))

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(feeding, "open_tracker", lambda *arguments: made)
    return made


def test_a_failure_is_one_warning_and_nothing_is_lost_or_sent_twice(tmp_path, fake, monkeypatch):
    directory = directory_of(tmp_path / "run")
    feed = feeding.Feed("wandb", directory)
    directory.trackers.mkdir()
    add_steps(directory, 1, 2)
    fake.failures = 2
    feed.send_new()
    feed.send_new()  # within the pause: no second try
    assert (fake.failures, fake.got) == (1, [])
    monkeypatch.setattr(feed, "_retry_at", 0.0)
    feed.send_new()
    (note,) = [line["message"] for line in read_lines(directory.events) if line["event"] == "note"]
    assert note.startswith("warning: tracker wandb failed and is tried again while training continues: see ")
    assert CANARY not in note
    add_steps(directory, 3)
    record_event(directory, "restart", attempt=1)
    feed.finish()
    assert [step for step, _ in fake.got] == [1, 2, 3, 3]
    assert fake.got[-1][1] == {"run/restarts": 1.0}
    keep_lines(directory.metrics, lambda line: line["step"] <= 1)  # a resume trains steps 2 and 3 again
    add_steps(directory, 2, 3, 4)
    feed.finish()
    later = feeding.Feed("wandb", directory)  # the next launch
    add_steps(directory, 5)
    later.finish()
    assert [step for step, figures in fake.got if "train/loss" in figures] == [1, 2, 3, 4, 5]
    stored = json.loads((directory.trackers / "wandb.json").read_text())
    assert stored == {"run_id": "there", "step": 5, "validation": 0, "tasks": 0, "events": 2}
    assert fake.events == ["note", "restart"]  # the next launch did not send them again
    record_event(directory, "restart", attempt=2)
    later.finish()
    assert fake.got[-1] == (5, {"run/restarts": 2.0})


def test_the_time_of_a_phase_is_sent_once_it_has_ended(tmp_path, fake):
    directory = directory_of(tmp_path / "run")
    directory.trackers.mkdir()
    record_event(directory, "phase", phase="building")
    first = feeding.Feed("wandb", directory)
    first.finish()
    assert fake.got == []
    record_event(directory, "phase", phase="training")
    later = feeding.Feed("wandb", directory)  # the next launch knows the phase that was sent
    later.finish()
    ((step, figures),) = fake.got
    assert (step, [*figures]) == (0, ["time/building_seconds"])
    assert 0 <= figures["time/building_seconds"] < 60


def test_losses_of_named_sets_and_scores_of_tasks_are_sent(tmp_path, fake):
    directory = directory_of(tmp_path / "run")
    directory.trackers.mkdir()
    add_steps(directory, 1, 2)
    append_line(directory.metrics, {"step": 2, "validation_loss": 3.0, "validation_loss/code": 2.5})
    append_line(directory.metrics, {"step": 2, "lm_eval/arc_easy/acc": 0.5})
    feeding.Feed("wandb", directory).finish()
    assert fake.got[2:] == [
        (2, {"validation/loss": 3.0, "validation/loss/code": 2.5}),
        (2, {"lm_eval/arc_easy/acc": 0.5}),
    ]


def test_the_figures_of_a_step():
    basis = ThroughputBasis(step_flops=100, devices=2, peak_flops=400.0)
    record = {"step": 3, "loss": 2.0, "grad_norm": None, "step_seconds": 0.5, "moe_load_max": [1.5, 2], "left": "x"}
    assert step_figures(record, one_worker(), basis) == {
        "train/loss": 2.0,
        "time/step_seconds": 0.5,
        "moe/load_max/0": 1.5,
        "moe/load_max/1": 2.0,
        "speed/mfu": 0.25,
    }


def test_the_figures_of_an_event():
    saved = {"event": "checkpoint", "seconds": 2, "waited_seconds": 0.5}
    assert event_figures(saved, 0, None) == {"time/checkpoint_seconds": 2.0, "time/waited_for_checkpoint_seconds": 0.5}
    assert event_figures({"event": "launch"}, 2, None) == {"run/restarts": 2.0}  # known before the first restart
    assert event_figures({"event": "note"}, 2, None) == {}
    looking, training = ({"phase": phase, "time": 10.0} for phase in ("looking for checkpoints", "training"))
    for event in ("phase", "restart", "outcome"):
        ended = event_figures({"event": event, "time": 12.5}, 0, looking)
        assert ended.pop("time/looking_for_checkpoints_seconds") == 2.5
        assert ended == ({"run/restarts": 0.0} if event == "restart" else {})
    assert event_figures({"event": "checkpoint", "time": 12.5}, 0, looking) == {}
    assert event_figures({"event": "phase", "time": 12.5}, 0, training) == {}  # each of its steps has its time


def test_a_prometheus_textfile_is_replaced_whole(tmp_path):
    spec = with_values(one_worker(), {"logging.prometheus_textfile": str(tmp_path / "m.prom"), "run.name": 'a"b'})
    tracker = PrometheusTextfile(spec, RunDirectory(tmp_path), None)
    tracker.log({"train/loss": 2.5}, 1, 10.0)
    tracker.log({"validation/loss": 3.0}, 2, 20.0)
    lines = (tmp_path / "m.prom").read_text().splitlines()
    assert 'megalaunch_train_loss{run="a\\"b"} 2.5' in lines
    assert 'megalaunch_step{run="a\\"b"} 2.0' in lines
    assert [name.name for name in tmp_path.iterdir()] == ["m.prom"]


def test_a_tracker_ends_with_a_killed_launcher(tmp_path):
    directory = directory_of(tmp_path / "run", logging__prometheus_textfile=str(tmp_path / "m.prom"))
    add_steps(directory, 1)
    code = (
        "import sys, time; from pathlib import Path; from megalaunch.rundir.paths import RunDirectory\n"
        "from megalaunch.schema.spec_file import read_spec; from megalaunch.launch.trackers.process import trackers\n"
        "directory = RunDirectory(Path(sys.argv[1]))\n"
        "with trackers(read_spec(directory.spec), directory): time.sleep(100)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(directory.root)])
    wait_until(lambda: (tmp_path / "m.prom").exists(), 60)
    below = [process.pid for process in descendants(launcher.pid)]
    assert len(below) == 1
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not running(below), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_the_real_package_without_a_server(tmp_path, monkeypatch, name):
    pytest.importorskip(name, reason=f"{name} (the extra `trackers`) is not installed")
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = directory_of(tmp_path / "run", logging__trackers=(name,))
    spec = with_values(one_worker(), {"logging.trackers": (name,)})
    for steps in ((1, 2), (3, 4)):  # two launches
        with trackers(spec, directory):
            add_steps(directory, *steps)
            state = directory.trackers / f"{name}.json"
            wait_until(lambda: state.exists() and json.loads(state.read_text())["step"] == steps[-1], 100)  # noqa: B023
    assert not directory.events.exists(), directory.events.read_text()
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(directory.tensorboard))
        found.Reload()
        assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
            (step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)
        ]
    elif name == "mlflow":
        losses = [path.read_text() for path in directory.trackers.rglob("metrics/train/loss")]
        assert [line.split()[2] for text in losses for line in text.splitlines()] == ["1", "2", "3", "4"]
    else:
        folders = [path.name for path in (directory.trackers / "wandb").glob("offline-run-*")]
        assert len(folders) == 2
        assert len({folder.rpartition("-")[2] for folder in folders}) == 1  # the same run


@pytest.mark.slow
def test_a_server_that_does_not_answer_delays_the_end_by_a_limit(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow (the extra `trackers`) is not installed")
    monkeypatch.setattr("megalaunch.launch.trackers.process.FINISH_SECONDS", 3.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{CANARY}@127.0.0.1:9")
    spec = with_values(one_worker(), {"logging.trackers": ("mlflow",)})
    directory = directory_of(tmp_path / "run", logging__trackers=("mlflow",))
    with trackers(spec, directory):
        add_steps(directory, 1)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    (note,) = [line["message"] for line in read_lines(directory.events)]
    assert note == "warning: tracker mlflow did not finish in 3 s: run the command again"
    assert CANARY not in "".join(path.read_text() for path in directory.root.rglob("*") if path.is_file())
    assert os.environ["MLFLOW_TRACKING_URI"]


HUNG = """
import sys, time

if "megalaunch.launch.trackers" in sys.orig_argv:
    open({path!r}, "w").close()
    time.sleep(1000)
elif "train" in sys.orig_argv:
    from megalaunch.launch.trackers import process
    process.FINISH_SECONDS = 4.0
"""


@pytest.mark.slow
def test_a_run_trains_to_its_end_while_a_tracker_hangs(tmp_path, record_property):
    """It takes nothing from its start on, so that a run that waited for it would not train a step."""
    hung = tmp_path / "hung"
    (tmp_path / "sitecustomize.py").write_text(HUNG.format(path=str(hung)))
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    overrides = ("train.steps=12", "logging.trackers=[tensorboard]")
    code, _, err = train_tiny(tmp_path, *overrides, PYTHONPATH=python_path)
    assert (code, err) == (0, "")
    run = RunDirectory(tmp_path / "run")
    assert hung.exists()
    assert not list(run.tensorboard.glob("*"))
    assert [line["step"] for line in read_lines(run.metrics) if "loss" in line] == list(range(1, 13))
    (outcome,) = (event for event in read_lines(run.events) if event["event"] == "outcome")
    (note,) = (event for event in read_lines(run.events) if event["event"] == "note")
    assert note["message"] == "warning: tracker tensorboard did not finish in 4 s: run the command again"
    assert note["time"] > outcome["time"] + 3
    record_property("end", note["time"] - outcome["time"])
