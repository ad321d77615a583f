"""Draw plots/loss.png: training and validation loss over the steps, and the learning rate below them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from megalaunch.fs import atomic_file, make_directory
from megalaunch.launch.run_state import number
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.metrics import is_validation, validation_losses
from megalaunch.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_run(directory: RunDirectory, title: str) -> Path | None:
    """Draw the metrics of a run; None without steps. Raises ImportError without matplotlib, OSError on a full disk."""
    records = list(read_lines(directory.metrics))
    if not any("loss" in record for record in records):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = loss_figure(records, title)
    FigureCanvasAgg(figure)
    make_directory(directory.plots)
    path = directory.plots / "loss.png"
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return path


def loss_figure(records: Sequence[Record], title: str) -> Figure:
    """Return the figure of a run's metrics, of which at least one is a step."""
    # The object interface draws without a window system and without global state.
    from matplotlib.figure import Figure

    steps = [record for record in records if "loss" in record]
    validations = [record for record in records if is_validation(record)]
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    at = _column(steps, "step")
    losses = _column(steps, "loss")
    loss_axes.plot(at, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
    loss_axes.plot(at, smooth(losses), color="tab:blue", label="training")
    for index, (name, (places, values)) in enumerate(validation_curves(validations).items(), start=1):
        loss_axes.plot(places, values, color=f"C{index}", marker="o", label=name)
    loss_axes.set(ylabel="loss (nats per token)", title=title)
    loss_axes.grid(alpha=0.3)
    loss_axes.legend()
    rate_axes.plot(at, _column(steps, "learning_rate"), color="tab:green")
    rate_axes.set(xlabel="step", ylabel="learning rate")
    rate_axes.grid(alpha=0.3)
    return figure


def validation_curves(validations: Sequence[Record]) -> dict[str, tuple[list[float], list[float]]]:
    """Return steps and losses of the run's validation data, and of each named validation set, by label."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for record in validations:
        for name, loss in validation_losses(record).items():
            places, values = curves.setdefault(f"validation: {name}" if name else "validation", ([], []))
            places.append(number(record, "step"))
            values.append(loss)
    return curves


def smooth(values: list[float]) -> list[float]:
    """Return the trailing moving average; the window is 1/50 of the number of values."""
    width = max(1, len(values) // 50)
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def _column(records: list[Record], key: str) -> list[float]:
    return [number(record, key) for record in records]
