"""The display of a sweep: a table that is redrawn in a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from megalaunch.format.numbers import format_count, format_duration, format_loss
from megalaunch.launch.display.event_messages import event_message
from megalaunch.launch.run_state import RunState, number
from megalaunch.runs.sweep.folder import Metric
from megalaunch.runs.sweep.results import TrialResult, rank_results, unranked_reason

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 24
_SILENCE = 20.0
_GAP = 2
_MIN_VALUES_WIDTH = 12  # of a trial's values; below it, columns of figures are omitted
_LEFT_ALIGNED = ("mark", "values", "state")
_TITLES = {"mark": "", "rate": "tokens/s", "spread": "p25 to p75"}
_OPTIONAL_COLUMNS = ("spread", "time", "loss", "rate")
"""The columns that a narrow terminal omits, the first one first."""


class SweepDisplay(Protocol):
    """Shows a sweep. The launcher also uses it as the display of the running trial."""

    def begin(self, results: Sequence[TrialResult], current: TrialResult) -> None:
        """Show that a trial starts; `results` are the current results of all trials."""

    def say(self, line: str) -> None:
        """Print one line that stays on the screen."""

    def update(self, view: RunState) -> None:
        """Show new records of the running trial."""

    def close(self) -> None:
        """Show that the running trial is over."""

    def end(self, result: TrialResult) -> None:
        """Show the result of the trial."""

    def finish(self) -> None:
        """End the display of the sweep and restore the terminal."""


def open_sweep_display(metric: Metric, terminal: bool, stream: TextIO) -> SweepDisplay:
    """Return the table for a terminal, else a display that prints lines to `stream`."""
    return LiveSweepDisplay(metric) if terminal else LogSweepDisplay(metric, stream)


class LogSweepDisplay:
    """Prints a line when a trial starts and ends, every 20 s between, and at failures, restarts and stop requests."""

    def __init__(self, metric: Metric, stream: TextIO) -> None:
        self._metric, self._stream = metric, stream
        self._last_line = time.monotonic()

    def begin(self, results: Sequence[TrialResult], current: TrialResult) -> None:
        """Print `trial 3 (2 of 8): parallel=tp2`."""
        place = [result.number for result in results].index(current.number) + 1
        again = ", continued" if current.state == "unfinished" else ""
        self.say(f"trial {current.number} ({place} of {len(results)}){again}: {label(current)}")

    def say(self, line: str) -> None:
        """Print one line now."""
        self._last_line = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # a closed stream ends the printing, not the sweep
            print(line, file=self._stream, flush=True)

    def update(self, view: RunState) -> None:
        """Print failures, restarts and stop requests at once, and figures every 20 s."""
        for event in view.fresh_events:
            if event.get("event") in ("worker_failed", "restart", "stop_requested") and (line := event_message(event)):
                self.say(f"  {line}")
        if view.latest is not None and time.monotonic() - self._last_line > _SILENCE:
            rate = format_count(number(view.latest, "tokens_per_second"))
            loss = format_loss(number(view.latest, "loss"))
            self.say(f"  step {view.step}/{view.last_step}, loss {loss}, {rate} tokens/s")

    def close(self) -> None:
        """Do nothing: there is no terminal state to restore."""

    def end(self, result: TrialResult) -> None:
        """Print the figures, or the reason why the trial is not ranked."""
        reason = unranked_reason(result, self._metric)
        self.say(f"  {result.state}: {reason or figures(result)}")

    def finish(self) -> None:
        """Do nothing: there is no terminal state to restore."""


class LiveSweepDisplay:
    """The table of the trials, redrawn in its calls: no thread, since the agent dies with the thread that forked it."""

    def __init__(self, metric: Metric) -> None:
        from rich.console import Console
        from rich.live import Live

        self._metric = metric
        self._live = Live(console=Console(), auto_refresh=False, transient=True)
        self._live.start()
        self._live.console.show_cursor(True)  # a killed launcher must not leave a terminal without one
        self._results: list[TrialResult] = []
        self._running: int | None = None
        self._view: RunState | None = None

    def begin(self, results: Sequence[TrialResult], current: TrialResult) -> None:
        """Mark the trial as running in the table."""
        self._results, self._running, self._view = list(results), current.number, None
        self._draw()

    def say(self, line: str) -> None:
        """Print one line above the table."""
        self._live.console.print(line, markup=False, highlight=False)

    def update(self, view: RunState) -> None:
        """Redraw with the newest figures."""
        self._view = view
        self._draw()

    def close(self) -> None:
        """Forget the trial's state; the table stays for the next trial."""
        self._view = None

    def end(self, result: TrialResult) -> None:
        """Add the trial's figures to the table."""
        self._results = [result if old.number == result.number else old for old in self._results]
        self._running = None
        self._draw()

    def finish(self) -> None:
        """Remove the table."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _draw(self) -> None:
        from megalaunch.launch.display.live_display import RIGHT_MARGIN

        visible = self._visible()
        table = trial_table([self._row(result) for result in visible], self._live.console.width - RIGHT_MARGIN)
        if (hidden := len(self._results) - self._rows) > 0:
            table.caption = f"{hidden} more trials"
        self._live.update(table, refresh=True)

    def _row(self, result: TrialResult) -> TrialRow:
        running = result.number == self._running
        best = [other.number for other in rank_results(self._results, self._metric)[:1]]
        mark = "*" if result.number in best else ""
        style = "bold" if running else "green" if mark else "red" if result.state == "failed" else ""
        state, rate, spread, *others = self._cells(result, running)
        cells = {"mark": mark, "trial": str(result.number), "values": short_label(result), "state": state}
        cells |= {"rate": rate, "spread": spread}
        return TrialRow(cells | dict(zip(("loss", "validation", "time"), others, strict=True)), style)

    @property
    def _rows(self) -> int:
        """Number of trials that fit on the screen, between heading and caption."""
        return max(4, min(_ROWS, self._live.console.height - 3))

    def _visible(self) -> list[TrialResult]:
        """Return the best trials, the running one and the next ones, in order, as many as fit."""
        if len(self._results) <= self._rows:
            return self._results
        visible = {result.number for result in rank_results(self._results, self._metric)[: self._rows // 2]}
        upcoming = [r.number for r in self._results if r.number == self._running or r.state == "waiting"]
        visible |= set(upcoming[: self._rows - len(visible)])
        return [result for result in self._results if result.number in visible]

    def _cells(self, result: TrialResult, running: bool) -> list[str]:
        """Return state, tokens/s, its interquartile range, loss, validation loss, time."""
        if not running:
            rate, *others = _figure_cells(result)
            rate, _, spread = rate.partition(" ")
            return [result.state, rate, spread.strip("()"), *others]
        view = self._view
        if view is None or view.latest is None:
            return [view.phase if view else "starting", "", "", "", "", ""]
        state = f"step {view.step}/{view.last_step}" if view.stepping else view.phase
        state = "stopping" if view.ending and view.stepping else state
        shown = (number(view.latest, "tokens_per_second"), number(view.latest, "loss"))
        validation = format_loss(number(view.validation, "validation_loss")) if view.validation else ""
        left = "" if view.seconds_left is None else f"{format_duration(view.seconds_left)} left"
        return [state, format_count(shown[0]), "", format_loss(shown[1]), validation, left]


def label(result: TrialResult) -> str:
    """Return the overrides in which a trial differs from the others."""
    return " ".join(f"{key}={value}" for key, value in result.values.items())


def short_label(result: TrialResult) -> str:
    """Return the label with only the last part of each key, if that is unique."""
    names = {key: key.rpartition(".")[2] for key in result.values}
    ambiguous = len(set(names.values())) < len(names)
    return " ".join(f"{key if ambiguous else names[key]}={value}" for key, value in result.values.items())


def figures(result: TrialResult) -> str:
    """Return the figures of one trial in a line."""
    rate, loss, validation, seconds = _figure_cells(result)
    parts = [f"{rate} tokens/s" if rate else "", f"loss {loss}" if loss else ""]
    parts += [f"validation loss {validation}" if validation else "", f"{seconds} of steps"]
    return ", ".join(part for part in parts if part)


def _figure_cells(result: TrialResult) -> list[str]:
    speed = result.speed
    rate = f"{format_count(speed.median)} ({format_count(speed.low)} to {format_count(speed.high)})" if speed else ""
    losses = ["" if loss is None else format_loss(loss) for loss in (result.loss, result.validation_loss)]
    return [rate, *losses, format_duration(result.seconds) if result.steps else ""]


@dataclass(frozen=True)
class TrialRow:
    """The cells of one trial, and the style of its line."""

    cells: Mapping[str, str]
    style: str


def trial_table(rows: Sequence[TrialRow], width: int) -> Table:
    """Return a table of at most `width` columns; only `values` is truncated, other columns are shown or omitted."""
    from rich.table import Table

    names = list(rows[0].cells) if rows else []
    for name in ("", *_OPTIONAL_COLUMNS):
        names = [shown for shown in names if shown != name]
        if _room(rows, names, width) >= min(_MIN_VALUES_WIDTH, _widest(rows, "values")):
            break
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for name in names:
        flexible = name == "values"
        table.add_column(
            _TITLES.get(name, name),
            justify="left" if name in _LEFT_ALIGNED else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if flexible else _widest(rows, name),
            max_width=max(1, _room(rows, names, width)) if flexible else None,
        )
    for row in rows:
        table.add_row(*(row.cells[name] for name in names), style=row.style)
    return table


def _room(rows: Sequence[TrialRow], names: Sequence[str], width: int) -> int:
    """Return the width that remains for `values`."""
    return width - sum(_widest(rows, name) + _GAP for name in names if name != "values") - _GAP


def _widest(rows: Sequence[TrialRow], name: str) -> int:
    return max(len(text) for text in (_TITLES.get(name, name), *(row.cells[name] for row in rows)))
