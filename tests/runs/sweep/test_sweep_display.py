"""What a person sees of a sweep, in a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from megalaunch.runs.sweep.display import (
    LiveSweepDisplay,
    LogSweepDisplay,
    TrialRow,
    open_sweep_display,
    short_label,
    trial_table,
)
from megalaunch.runs.sweep.results import Speed, TrialResult

DONE = TrialResult(1, {"parallel": "dp1"}, "done", 0, "", 20, 8.0, Speed(1234.0, 1200.0, 1300.0, 18), 3.1, 3.2)
SLOWER = TrialResult(2, {"parallel": "dp2"}, "done", 0, "", 20, 9.0, Speed(999.0, 900.0, 1100.0, 18), 3.1, 3.2)
FAILED = TrialResult(3, {"parallel": "dp4"}, "failed", 5, "rank 1: out of luck", 7, 3.0, Speed(9e9, 9e9, 9e9, 5), 9.0)
NEXT = TrialResult(4, {"parallel": "dp8"}, "waiting")


def view(step, **changes):
    latest = {"step": step, "loss": 2.5, "tokens_per_second": 4321.0} if step else None
    plain = {"phase": "loading", "validation": None, "seconds_left": 3.0, "fresh_events": [], "ending": False}
    return SimpleNamespace(**{**plain, "latest": latest, "step": step, "last_step": 20, "stepping": True, **changes})


def test_lines_tell_of_every_start_and_end():
    stream = io.StringIO()
    display = open_sweep_display("tokens_per_second", False, stream)
    assert isinstance(display, LogSweepDisplay)
    display.begin([DONE, NEXT], NEXT)
    display.update(view(0))
    event = {"event": "worker_failed", "rank": 1, "step": 3, "exception": "OSError", "message": "no"}
    display.update(SimpleNamespace(**{**vars(view(1)), "fresh_events": [event]}))
    display.end(DONE)
    display.end(FAILED)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "trial 4 (2 of 2): parallel=dp8"
    assert "OSError" in lines[1]
    assert lines[2] == "  done: 1,234 (1,200 to 1,300) tokens/s, loss 3.1000, validation loss 3.2000, 8 s of steps"
    assert lines[3] == "  failed: rank 1: out of luck"


def test_a_reader_that_is_gone_stops_no_sweep():
    stream = io.StringIO()
    stream.close()
    LogSweepDisplay("tokens_per_second", stream).begin([NEXT], NEXT)


@pytest.fixture
def live(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=stream, force_terminal=True, width=130, height=20))
    display = LiveSweepDisplay("tokens_per_second")
    yield display, stream
    display.finish()


def rows(stream):
    """The text of the lines of the last picture, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [line.split() for line in text[text.rindex("values") :].splitlines()]


def test_the_table_marks_the_best_and_follows_the_running_trial(live):
    display, stream = live
    display.begin([DONE, SLOWER, FAILED, NEXT], NEXT)
    display.update(view(0))
    assert ["4", "parallel=dp8", "loading"] in rows(stream)
    display.update(view(7))
    assert ["4", "parallel=dp8", "step", "7/20", "4,321", "2.5000", "3", "s", "left"] in rows(stream)
    display.update(view(7, stepping=False, phase="validating"))
    assert ["4", "parallel=dp8", "validating", "4,321", "2.5000", "3", "s", "left"] in rows(stream)
    display.update(view(7, ending=True, seconds_left=None))
    assert ["4", "parallel=dp8", "stopping", "4,321", "2.5000"] in rows(stream)
    shown = rows(stream)
    assert [row[0] for row in shown if "parallel=dp1" in row] == ["*"]
    assert not any(row[:1] == ["*"] and "parallel=dp4" in row for row in shown)
    display.end(TrialResult(4, NEXT.values, "done", 0, "", 20, 8.0, Speed(2000.0, 1, 1, 18), 3.1))
    assert [row[0] for row in rows(stream) if "parallel=dp8" in row] == ["*"]


@pytest.mark.parametrize(("width", "kept"), [(130, 9), (80, 7), (60, 5)])
def test_no_figure_is_cut_at_any_width(width, kept):
    cells = {"mark": "*", "trial": "12", "values": "optimizer.lr=0.0003 train.seed=1234", "state": "step 12345/20000"}
    cells |= {
        "rate": "1,234,567",
        "spread": "1,200,000 to 1,300,000",
        "loss": "3.1234",
        "validation": "3.2345",
        "time": "2 h 07 min",
    }
    console = Console(width=width, file=io.StringIO())
    console.print(trial_table([TrialRow(cells, "")], width - 3))
    heading, line = console.file.getvalue().splitlines()
    assert len(line.rstrip()) <= width - 3
    shown = [name for name in cells if name != "values" and cells[name] in line]
    assert len(shown) + 1 == kept, line
    assert "optimizer." in line
    assert len(heading.split()) >= kept - 1


def test_keys_are_short_where_that_tells_them_apart():
    values = {"optimizer.lr": "1e-3", "train.seed": "1"}
    assert short_label(TrialResult(1, values, "done")) == "lr=1e-3 seed=1"
    values = {"model.init_std": "1", "model.moe.init_std": "2"}
    assert short_label(TrialResult(1, values, "done")) == "model.init_std=1 model.moe.init_std=2"


def test_a_long_table_shows_the_best_and_what_comes(live):
    display, stream = live
    done = [TrialResult(n, {"a": str(n)}, "done", 0, "", 9, 1.0, Speed(n, n, n, 9)) for n in range(1, 41)]
    waiting = [TrialResult(n, {"a": str(n)}, "waiting") for n in range(41, 81)]
    display.begin([*done, *waiting], waiting[0])
    shown = [row[0] for row in rows(stream) if any(cell.startswith("a=") for cell in row)]
    assert len(shown) == 17
    assert {"39", "41"} <= set(shown)
    assert "63 more trials" in " ".join(" ".join(row) for row in rows(stream))
