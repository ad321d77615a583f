"""What a person sees, from the run's files alone: lines without a terminal, a panel in one, summary, plot."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
from launching import tiny_spec
from rich.console import Console

from megalaunch.launch.directory import create_folders
from megalaunch.launch.display.live_display import RIGHT_MARGIN, LiveDisplay, doing_now, panel, sparkline
from megalaunch.launch.display.log_display import PlainDisplay
from megalaunch.launch.display.plot import plot_run, smooth
from megalaunch.launch.display.summary import run_summary
from megalaunch.launch.run_state import RunState, ThroughputBasis
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line, keep_lines
from megalaunch.rundir.outcome import Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema import with_values

SCALE = ThroughputBasis(step_flops=10**12, devices=2, peak_flops=2.5e12)


def step(number: int, **changes) -> dict:
    record = {
        "step": number,
        "loss": 8.0 / number,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": 2048 * number,
        "tokens_per_second": 4096.0,
        "step_seconds": 0.5,
        "memory_bytes": 3 * 2**29,
    }
    return {**record, **changes}


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    create_folders(found)
    return found


def spec(**values):
    return tiny_spec(logging__log_interval=5, **values)


def test_a_growing_file_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "lines"
    follower = JsonlTail(path)
    assert follower.read_new() == ([], False)
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": ')
    assert follower.read_new() == ([{"a": 1}], False)
    with path.open("a") as file:
        file.write("2}\nnot json\n")
    assert follower.read_new() == ([{"a": 2}], False)
    keep_lines(path, lambda record: record["a"] == 1)
    assert follower.read_new() == ([{"a": 1}], True)
    assert follower.read_new() == ([], False)


def test_lines_without_a_terminal(directory):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = PlainDisplay(stream)
    record_event(directory, "phase", phase="building", elapsed_seconds=3.2)
    for number in range(1, 8):
        append_line(directory.metrics, step(number))
    append_line(directory.metrics, {"step": 5, "validation_loss": 4.5})
    record_event(directory, "checkpoint", step=7, path="x", seconds=0.25)
    view.refresh()
    display.update(view)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "building (3 s since the start)",
        lines[1],
        "step  5/20  loss 1.6000  grad norm 0.500  lr 1.00e-03  4,096 tokens/s  1 TFLOP/s  MFU 40.0%  1.5 GiB"
        "  6 s left",
        "step 5  validation loss 4.5000",
        "checkpoint of step 7 saved (0.2 s)",
    ]
    assert lines[1].startswith("step  1/20  loss 8.0000")


def test_steps_that_are_redone_after_a_cut_are_shown_again(directory):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = PlainDisplay(stream)
    for number in range(1, 13):
        append_line(directory.metrics, step(number))
    view.refresh()
    display.update(view)
    keep_lines(directory.metrics, lambda record: record["step"] <= 6)
    view.refresh()
    display.update(view)
    assert view.step == 6
    for number in range(7, 13):
        append_line(directory.metrics, step(number))
    view.refresh()
    display.update(view)
    shown = [line.split("/")[0].split()[-1] for line in stream.getvalue().splitlines()]
    assert shown == ["1", "5", "10", "10"]


def test_a_resumed_run_shows_only_what_is_new(directory):
    for number in range(1, 11):
        append_line(directory.metrics, step(number))
    record_event(directory, "note", message="old")
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = PlainDisplay(stream)
    display.update(view)
    for number in range(11, 16):
        append_line(directory.metrics, step(number))
    view.refresh()
    display.update(view)
    assert [line[:10] for line in stream.getvalue().splitlines()] == ["step 15/20"]


def test_silence_is_broken_while_nothing_steps(directory, monkeypatch):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = PlainDisplay(stream)
    record_event(directory, "phase", phase="loading torch", elapsed_seconds=0.0)
    view.refresh()
    display.update(view)
    now, wall = time.monotonic(), time.time()
    monkeypatch.setattr(time, "monotonic", lambda: now + 9.5)
    monkeypatch.setattr(time, "time", lambda: wall + 10.5)
    view.refresh()
    display.update(view)
    assert stream.getvalue().splitlines()[1].startswith("still loading torch (step 0, 1")
    append_line(directory.metrics, step(2))
    view.refresh()
    display.update(view)
    record_event(directory, "phase", phase="validating", elapsed_seconds=40.0)
    record_event(directory, "phase", phase="training", elapsed_seconds=40.0)
    append_line(directory.metrics, step(3))
    view.refresh()
    display.update(view)
    monkeypatch.setattr(time, "monotonic", lambda: now + 30)
    view.refresh()
    display.update(view)
    assert len(stream.getvalue().splitlines()) == 2  # a step may take its time
    monkeypatch.setattr(time, "monotonic", lambda: now + 80)
    display.update(view)
    assert "still training (step 3" in stream.getvalue()


def test_long_work_on_files_shows_how_far_it_is(directory, monkeypatch):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = PlainDisplay(stream)
    append_line(directory.metrics, step(1))
    view.refresh()
    record_event(directory, "phase", phase="saving", step=1, elapsed_seconds=9.0)
    record_event(directory, "progress", phase="saving", step=1, done=3 * 10**9, total=12 * 10**9)
    view.refresh()
    display.update(view)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(view, 97))
    assert "saving step 1: 25% of 12.0 GB" in console.export_text()
    later = time.monotonic() + 10
    monkeypatch.setattr(time, "monotonic", lambda: later)
    view.refresh()
    display.update(view)
    assert "still saving step 1: 25% of 12.0 GB" in stream.getvalue()
    record_event(directory, "checkpoint", step=1, path="x", seconds=20.0, waited_seconds=0.31)
    view.refresh()
    display.update(view)
    assert view.files is None
    assert stream.getvalue().splitlines()[-1] == "checkpoint of step 1 saved (20.0 s, training waited 0.3 s)"


def test_a_closed_pipe_does_not_end_the_run(directory):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    display = PlainDisplay(Gone())
    display.say("x")
    display.say("y")


def test_the_panel_shows_everything(directory, monkeypatch):
    view = RunState(spec(run__name="quick"), directory, SCALE)
    for number in range(1, 11):
        append_line(directory.metrics, step(number))
    append_line(directory.metrics, {"step": 10, "validation_loss": 4.25})
    view.refresh()
    record_event(directory, "launch")
    view.refresh()
    launched = time.time()
    monkeypatch.setattr(time, "time", lambda: launched + 65)
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(panel(view, 97))
    text = console.file.getvalue()
    for part in (
        "quick · training · 1 min 05 s",
        "step 10/20  50%  5 s left",
        "loss 0.8000",
        "validation 4.2500",
        "grad norm 0.500",
        "lr 1.00e-03",
        "tokens/s 4,096",
        "tokens 20,480",
        "memory 1.5 GiB",
        "per device 1 TFLOP/s",
        "MFU 40.0%",
        str(directory.root)[:20],
    ):
        assert part in text, part


BIG = step(9, tokens=123456789012, tokens_per_second=12345678.0, memory_bytes=76.5 * 2**30, grad_norm=1234.5678)


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120])
def test_no_figure_is_cut_at_any_width(directory, width):
    view = RunState(spec(train__steps=1_200_000), directory, SCALE)
    append_line(directory.metrics, BIG)
    append_line(directory.metrics, {"step": 9, "validation_loss": 4.25})
    view.refresh()
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(panel(view, width - RIGHT_MARGIN))
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {width - RIGHT_MARGIN}  # a ^C behind the last one wraps no line
    for figure in ("123,456,789,012", "12,345,678", "76.5 GiB", "1234.568", "4.2500", "MFU 40.0%", "step 9/1200000"):
        assert any(figure in line for line in lines), figure


def test_watch_and_train_show_the_same_clock(directory, monkeypatch):
    train = RunState(spec(), directory, SCALE)
    record_event(directory, "launch")
    train.refresh()
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    watch = RunState(spec(), directory, SCALE, attach=True)
    assert watch.elapsed == train.elapsed
    assert 99 < watch.elapsed < 110


def test_a_stop_is_told_once_and_ends_the_estimate(directory):
    view = RunState(spec(), directory, SCALE)
    for number in range(1, 4):
        append_line(directory.metrics, step(number))
    record_event(directory, "launch")
    view.refresh()
    assert view.seconds_left
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for _ in range(2):  # the launcher's, and that of the worker that it asked
        record_event(directory, "stop_requested", signal="SIGINT")
        view.refresh()
        display.update(view)
    assert stream.getvalue().count("SIGINT received") == 1
    assert view.seconds_left is None
    assert doing_now(view) == "stopping"
    assert RunState(spec(), directory, SCALE, attach=True).ending
    record_event(directory, "phase", phase="saving")
    view.refresh()
    assert doing_now(view) == "saving"
    again = RunState(spec(), directory, SCALE)  # the same command goes on
    record_event(directory, "launch")
    record_event(directory, "stop_requested", signal="SIGTERM")
    again.refresh()
    assert [event["event"] for event in again.fresh_events] == ["launch", "stop_requested"]


def test_the_estimate_stands_still_while_no_step_comes(directory, monkeypatch):
    view = RunState(spec(train__steps=1000), directory, SCALE)
    clock = time.monotonic()
    for number in range(1, 41):
        monkeypatch.setattr(time, "monotonic", lambda now=clock + number: now)
        append_line(directory.metrics, step(number))
        view.refresh()
    left = view.seconds_left
    assert left == pytest.approx(960)  # a step a second, saves and validations among them
    monkeypatch.setattr(time, "monotonic", lambda: clock + 500)
    assert view.seconds_left == left


def test_a_restart_on_fewer_nodes_is_told_and_counts_its_own_devices_and_steps(directory):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    append_line(directory.metrics, step(1))
    view.refresh()
    assert view.device_flops == 1e12 / 0.5 / 2
    record_event(directory, "nodes_changed", nodes=1, wanted=2, hosts=["a"], reason="node 1 (b) is not reached: x")
    record_event(directory, "launch", workers=1)
    view.refresh()
    PlainDisplay(stream).update(view)
    assert stream.getvalue().startswith("the run continues on 1 of 2 nodes: node 1 (b) is not reached: x\n")
    append_line(directory.metrics, step(2, step_seconds=1.0))
    view.refresh()
    assert view.device_flops == 1e12


def test_the_panel_before_the_first_step(directory):
    view = RunState(spec(), directory, ThroughputBasis(10**12, 2, None))
    console = Console(width=100, file=io.StringIO())
    console.print(panel(view, 97))
    text = console.file.getvalue()
    assert "starting" in text
    assert "loss -" in text
    assert "MFU" not in text
    assert "nan" not in text


def test_the_live_display_draws_and_leaves(directory):
    stream = io.StringIO()
    view = RunState(spec(), directory, SCALE)
    display = LiveDisplay(Console(width=100, file=stream, force_terminal=True))
    record_event(directory, "restart", attempt=1, reason="rank 1 [dp1] was killed")
    record_event(directory, "worker_failed", rank=None, step=1, exception="hang", message="no progress on any rank")
    append_line(directory.metrics, step(1))
    append_line(directory.metrics, {"step": 1, "lm_eval/arc_easy/acc": 0.25})
    view.refresh()
    display.update(view)
    display.close()
    assert "restart 1: rank 1 [dp1] was killed" in stream.getvalue()
    assert "the agent failed at step 1: hang: no progress on any rank" in stream.getvalue()
    assert "step 1  arc_easy/acc 0.2500" in stream.getvalue()
    assert "step 1/20" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") <= stream.getvalue().count("\x1b[?25h")  # the cursor is there


def test_the_sparkline():
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([1.0, float("nan"), 3.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([float("nan")]) == ""


def test_the_summary(directory):
    for number in range(1, 21):
        append_line(directory.metrics, step(number, loss=4.0 if number > 10 else 6.0))
    append_line(directory.metrics, {"step": 20, "validation_loss": 4.5})
    directory.checkpoint(10).mkdir()
    directory.checkpoint(20).mkdir()
    (directory.checkpoints / ".step_00000030.unfinished").mkdir()
    directory.sample.write_text("def main():\n    pass\x1b[2J\n")
    lines = run_summary(spec(), directory, Outcome(0, "finished all 20 steps", 20))
    assert lines == [
        "fake: finished all 20 steps",
        "  training loss    5.0000 (mean of the last 20 steps)",
        "  validation loss  4.5000 (step 20)",
        "  tokens           40,960 seen in 10 s of steps, 4,096 tokens/s on average",
        f"  checkpoint       {directory.checkpoint(20)}",
        "  the model wrote",
        "    | def main():",
        "    |     pass\N{MIDDLE DOT}[2J",
    ]


def test_the_summary_says_why_there_is_no_validation_loss(directory):
    append_line(directory.metrics, step(3))
    why = "  validation loss  none: the run has no validation data"
    assert spec().train.validation_interval > 0
    assert why in run_summary(spec(), directory, Outcome(0, "finished all 3 steps", 3))
    assert why not in run_summary(spec(), directory, Outcome(130, "interrupted", 3)), "the next one may be due later"
    without = with_values(spec(), {"train.validation_interval": 0})
    assert why not in run_summary(without, directory, Outcome(0, "finished all 3 steps", 3))


def test_the_plot(directory):
    pytest.importorskip("matplotlib")
    assert plot_run(directory, "x") is None
    for number in range(1, 21):
        append_line(directory.metrics, step(number))
    append_line(directory.metrics, {"step": 20, "validation_loss": 4.5})
    path = plot_run(directory, "x")
    assert path == directory.plots / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in directory.plots.iterdir()] == ["loss.png"]
    assert "matplotlib.pyplot" not in sys.modules


def test_smoothing_ends_at_each_value():
    assert smooth([1.0, 2.0]) == [1.0, 2.0]
    assert smooth([0.0] * 99 + [2.0])[-1] == 1.0


def test_a_metrics_line_with_holes_is_shown(directory):
    view = RunState(spec(), directory, SCALE)
    append_line(directory.metrics, json.loads('{"step": 5, "loss": NaN, "step_seconds": null}'))
    view.refresh()
    stream = io.StringIO()
    PlainDisplay(stream).update(view)
    assert "loss nan" in stream.getvalue()
    assert Path(directory.metrics).exists()
