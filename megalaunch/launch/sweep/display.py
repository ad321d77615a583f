"""What a person sees of a sweep: a table that is redrawn in a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from megalaunch.launch.event_messages import event_message
from megalaunch.launch.format import format_count, format_duration, format_loss
from megalaunch.launch.run_state import RunState, number
from megalaunch.launch.sweep.directory import Metric
from megalaunch.launch.sweep.result import TrialResult, rank_results, unranked_reason

if TYPE_CHECKING:
    from megalaunch.launch.sweep.trial_table import TrialRow

_ROWS = 24
_SILENCE = 20.0


class SweepDisplay(Protocol):
    """Shows a sweep; as the display of the trial that runs it is called by the launcher."""

    def begin(self, results: Sequence[TrialResult], current: TrialResult) -> None:
        """A trial starts; `results` are all trials as they are now."""

    def say(self, line: str) -> None:
        """Show one line that stays."""

    def update(self, view: RunState) -> None:
        """The running trial has news."""

    def close(self) -> None:
        """The running trial is over."""

    def end(self, result: TrialResult) -> None:
        """What it came to."""

    def skip(self) -> None:
        """The sweep is over: leave the terminal as it was."""


def open_board(metric: Metric, terminal: bool, stream: TextIO) -> SweepDisplay:
    """The table where there is a terminal, lines on `stream` elsewhere."""
    return LiveSweepDisplay(metric) if terminal else LogSweepDisplay(metric, stream)


class LogSweepDisplay:
    """A line when a trial starts and ends, one every 20 s between, and one for all that happens to it."""

    def __init__(self, metric: Metric, stream: TextIO) -> None:
        self._metric, self._stream = metric, stream
        self._spoke = time.monotonic()

    def begin(self, results: Sequence[TrialResult], current: TrialResult) -> None:
        """`trial 3 (2 of 8): parallel=tp2`."""
        place = [result.number for result in results].index(current.number) + 1
        again = ", continued" if current.state == "unfinished" else ""
        self.say(f"trial {current.number} ({place} of {len(results)}){again}: {label(current)}")

    def say(self, line: str) -> None:
        """Print one line now."""
        self._spoke = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone stops the printing, not the sweep
            print(line, file=self._stream, flush=True)

    def update(self, view: RunState) -> None:
        """Failures and checkpoints at once, figures now and then."""
        for event in view.fresh_events:
            if event.get("event") in ("worker_failed", "restart", "stop_requested") and (line := event_message(event)):
                self.say(f"  {line}")
        if view.latest is not None and time.monotonic() - self._spoke > _SILENCE:
            rate = format_count(number(view.latest, "tokens_per_second"))
            loss = format_loss(number(view.latest, "loss"))
            self.say(f"  step {view.step}/{view.last_step}, loss {loss}, {rate} tokens/s")

    def close(self) -> None:
        """Nothing to clear away."""

    def end(self, result: TrialResult) -> None:
        """The figures, or the reason why there are none."""
        reason = unranked_reason(result, self._metric)
        self.say(f"  {result.state}: {reason or figures(result)}")

    def skip(self) -> None:
        """Nothing to clear away."""


class LiveSweepDisplay:
    """A table of the trials; it starts no thread, since the agent dies with the thread that started it."""

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
        """Mark it in the table."""
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
        """The table stays for the next trial."""
        self._view = None

    def end(self, result: TrialResult) -> None:
        """Put its figures into the table."""
        self._results = [result if old.number == result.number else old for old in self._results]
        self._running = None
        self._draw()

    def skip(self) -> None:
        """Take the table away."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _draw(self) -> None:
        from megalaunch.launch.live_display import KEPT_FREE
        from megalaunch.launch.sweep.trial_table import trial_table

        visible = self._visible()
        table = trial_table([self._row(result) for result in visible], self._live.console.width - KEPT_FREE)
        if (hidden := len(self._results) - self._rows) > 0:
            table.caption = f"{hidden} more trials"
        self._live.update(table, refresh=True)

    def _row(self, result: TrialResult) -> TrialRow:
        from megalaunch.launch.sweep.trial_table import TrialRow

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
        """Trials that fit on the screen, between heading and caption."""
        return max(4, min(_ROWS, self._live.console.height - 3))

    def _visible(self) -> list[TrialResult]:
        """The best ones, the running one and what comes next, in order."""
        if len(self._results) <= self._rows:
            return self._results
        kept = {result.number for result in rank_results(self._results, self._metric)[: self._rows // 2]}
        upcoming = [r.number for r in self._results if r.number == self._running or r.state == "waiting"]
        kept |= set(upcoming[: self._rows - len(kept)])
        return [result for result in self._results if result.number in kept]

    def _cells(self, result: TrialResult, running: bool) -> list[str]:
        """State, tokens/s, its middle half, loss, validation loss, time."""
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
    """The values that set a trial apart."""
    return " ".join(f"{key}={value}" for key, value in result.values.items())


def short_label(result: TrialResult) -> str:
    """The same with the last part of each key, where that tells the keys apart."""
    names = {key: key.rpartition(".")[2] for key in result.values}
    whole = len(set(names.values())) < len(names)
    return " ".join(f"{key if whole else names[key]}={value}" for key, value in result.values.items())


def figures(result: TrialResult) -> str:
    """The figures of one trial in a line."""
    rate, loss, validation, seconds = _figure_cells(result)
    parts = [f"{rate} tokens/s" if rate else "", f"loss {loss}" if loss else ""]
    parts += [f"validation loss {validation}" if validation else "", f"{seconds} of steps"]
    return ", ".join(part for part in parts if part)


def _figure_cells(result: TrialResult) -> list[str]:
    speed = result.speed
    rate = f"{format_count(speed.median)} ({format_count(speed.low)} to {format_count(speed.high)})" if speed else ""
    losses = ["" if loss is None else format_loss(loss) for loss in (result.loss, result.validation_loss)]
    return [rate, *losses, format_duration(result.seconds) if result.steps else ""]
