"""The display in a terminal: a panel that is redrawn in place, with what happens printed above it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalaunch.launch.happening import sentence
from megalaunch.launch.plain import validation_line
from megalaunch.launch.view import RunView, number
from megalaunch.launch.words import bytes_of_memory, count_of, duration, flops_of, loss_of

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48


class LiveDisplay:
    """Redraws when told to; it starts no thread, since the agent dies with the thread that started it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._began = time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._console.show_cursor(True)  # a killed launcher must not leave a terminal without one

    def say(self, line: str) -> None:
        """Print one line above the panel."""
        self._live.console.print(line, markup=False, highlight=False)

    def update(self, view: RunView) -> None:
        """Print what happened and redraw the panel."""
        for event in view.fresh_events:
            if (line := sentence(event)) and event.get("event") != "phase":
                self.say(line)
        for record in view.fresh_metrics:
            if "loss" not in record:
                self.say(validation_line(record))
        self._live.update(panel(view, time.monotonic() - self._began), refresh=True)

    def close(self) -> None:
        """Take the panel away."""
        with contextlib.suppress(OSError):
            self._live.stop()


def panel(view: RunView, elapsed: float) -> Panel:
    """The whole picture of a run."""
    doing = "training" if view.stepping else view.phase
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(ProgressBar(total=max(1, view.last_step), completed=view.step), _position(view))
    rows: list[Table | Text] = [bar, _figures(view)]
    if view.files:
        rows.append(Text(view.files))
    if len(view.losses) > 1:
        rows.append(Text(f"loss {sparkline(view.losses)}", style="dim"))
    title = f"{view.spec.run.name} · {doing} · {duration(elapsed)}"
    return Panel(Group(*rows), title=title, subtitle=str(view.directory.root), border_style="cyan")


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The values as a row of blocks, the newest on the right; what is not finite is a blank."""
    recent = list(values)[-width:]
    finite = [value for value in recent if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] if low <= value <= high else " " for value in recent)


def _position(view: RunView) -> Text:
    share = view.step / max(1, view.last_step)
    left = "" if view.seconds_left is None else f"  {duration(view.seconds_left)} left"
    return Text(f"step {view.step}/{view.last_step}  {share:.0%}{left}")


def _figures(view: RunView) -> Table:
    latest = view.latest
    cells = [
        ("loss", loss_of(number(latest, "loss"))),
        ("validation", loss_of(number(view.validation, "validation_loss"))),
        ("grad norm", f"{number(latest, 'grad_norm'):.3f}"),
        ("lr", f"{number(latest, 'learning_rate'):.2e}"),
        ("tokens/s", count_of(number(latest, "tokens_per_second"))),
        ("tokens", count_of(number(latest, "tokens"))),
        ("memory", bytes_of_memory(number(latest, "memory_bytes"))),
        ("per device", flops_of(view.device_flops)),
    ]
    if view.scale.peak_flops:
        cells.append(("MFU", f"{view.utilization:.1%}" if view.utilization else "-"))
    table = Table.grid(padding=(0, 3))
    for _ in range(4):
        table.add_column(no_wrap=True)
    shown = [Text.assemble((f"{name} ", "dim"), (value.replace("nan", "-"), "bold")) for name, value in cells]
    for index in range(0, len(shown), 4):
        table.add_row(*shown[index : index + 4])
    return table
