"""The display in a terminal: a panel that is redrawn in place, with events printed above it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalaunch.format.numbers import format_count, format_duration, format_flops, format_loss, format_memory
from megalaunch.format.paths import display_path
from megalaunch.launch.display.event_messages import event_message
from megalaunch.launch.display.log_display import evaluation_line
from megalaunch.launch.run_state import RunState, number
from megalaunch.rundir.metrics import task_scores, validation_losses

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_FRAME = 4  # the panel's border and padding
_GAP = 3  # columns between two figures
RIGHT_MARGIN = 3
"""Columns at the right that stay empty: a terminal writes `^C` after the cursor, and a line that wraps
would move the panel down, so that its first line would remain on the screen."""


class LiveDisplay:
    """The panel of a run, redrawn by `update`: no thread, since the agent dies with the thread that forked it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._console.show_cursor(True)  # a killed launcher must not leave a terminal without one

    def say(self, line: str) -> None:
        """Print one line above the panel."""
        self._live.console.print(line, markup=False, highlight=False)

    def update(self, view: RunState) -> None:
        """Print new events and redraw the panel."""
        for event in view.fresh_events:
            if (line := event_message(event)) and event.get("event") != "phase":
                self.say(line)
        for record in view.fresh_metrics:
            if "loss" not in record:
                self.say(evaluation_line(record))
        self._live.update(panel(view, self._console.width - RIGHT_MARGIN), refresh=True)

    def close(self) -> None:
        """Remove the panel."""
        with contextlib.suppress(OSError):
            self._live.stop()


def panel(view: RunState, width: int) -> Panel:
    """Draw the state of a run as a panel of `width` columns."""
    doing = doing_now(view)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(ProgressBar(total=max(1, view.last_step), completed=view.step), _position(view))
    rows: list[Table | Text] = [bar, _figures(view, width - _FRAME)]
    if view.files:
        rows.append(Text(view.files))
    if len(view.losses) > 1:
        sparks = sparkline(view.losses, min(_SPARK_WIDTH, max(8, width - _FRAME - len("loss "))))
        rows.append(Text(f"loss {sparks}", style="dim"))
    title = f"{view.spec.run.name} · {doing} · {format_duration(view.elapsed)}"
    return Panel(
        Group(*rows), title=title, subtitle=display_path(view.directory.root), border_style="cyan", width=width
    )


def doing_now(view: RunState) -> str:
    """Return a run's activity: `training`, `stopping` after a stop request, or its phase."""
    doing = "training" if view.stepping else view.phase
    return "stopping" if view.ending and view.stepping else doing


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Draw values as a row of blocks, newest on the right; a blank for a value that is not finite."""
    recent = list(values)[-width:]
    finite = [value for value in recent if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] if low <= value <= high else " " for value in recent)


def _position(view: RunState) -> Text:
    share = view.step / max(1, view.last_step)
    left = "" if view.seconds_left is None else f"  {format_duration(view.seconds_left)} left"
    return Text(f"step {view.step}/{view.last_step}  {share:.0%}{left}")


def _figures(view: RunState, width: int) -> Table:
    latest = view.latest
    cells = [
        ("loss", format_loss(number(latest, "loss"))),
        ("validation", format_loss(number(view.validation, "validation_loss"))),
        *((name, format_loss(loss)) for name, loss in validation_losses(view.validation or {}).items() if name),
        *((name, f"{score:.4f}") for name, score in task_scores(view.tasks or {}).items()),
        ("grad norm", f"{number(latest, 'grad_norm'):.3f}"),
        ("lr", f"{number(latest, 'learning_rate'):.2e}"),
        ("tokens/s", format_count(number(latest, "tokens_per_second"))),
        ("tokens", format_count(number(latest, "tokens"))),
        ("memory", format_memory(number(latest, "memory_bytes"))),
        ("per device", format_flops(view.device_flops)),
    ]
    if view.scale.peak_flops:
        cells.append(("MFU", f"{view.utilization:.1%}" if view.utilization else "-"))
    shown = [Text.assemble((f"{name} ", "dim"), (value.replace("nan", "-"), "bold")) for name, value in cells]
    columns = next((count for count in (4, 3, 2) if _width(shown, count) <= width), 1)
    table = Table.grid(padding=(0, _GAP))
    for _ in range(columns):
        table.add_column(no_wrap=True)
    for index in range(0, len(shown), columns):
        table.add_row(*shown[index : index + columns])
    return table


def _width(shown: Sequence[Text], columns: int) -> int:
    """Return the terminal columns that the figures need in a table of `columns` columns."""
    widest = [max((text.cell_len for text in shown[column::columns]), default=0) for column in range(columns)]
    return sum(widest) + _GAP * (columns - 1)
