"""Draw plots/experts.png: the load of each layer with experts, and of each expert of some layers, over the steps.

Shapes: L layers, E experts, C columns of the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megalaunch.fs import atomic_file, make_directory
from megalaunch.rundir.expert_load import ExpertLoadHistory, read_expert_load
from megalaunch.rundir.paths import RunDirectory

_MAX_COLUMNS, _MAX_LAYERS = 512, 12
_FEWEST, _MOST = 1 / 4, 4.0  # times the mean load, at the ends of the colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]


def plot_experts(directory: RunDirectory, title: str) -> Path | None:
    """Draw a run's load of experts; None without any. Raises ImportError without matplotlib, OSError on a full disk."""
    history = read_expert_load(directory.expert_load)
    if history is None or not len(history.steps):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = experts_figure(history, title)
    FigureCanvasAgg(figure)
    make_directory(directory.plots)
    path = directory.plots / "experts.png"
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return path


def experts_figure(history: ExpertLoadHistory, title: str) -> Figure:
    """Return the figure of a load history with at least one step. Raises ImportError without matplotlib.

    The first row is a heat map of all layers: tokens of the most loaded expert over the mean. Below, a heat map of at
    most 12 layers, evenly spaced: tokens of each expert over the mean.
    """
    # The object interface draws without a window system and without global state.
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    load_CLE = relative_load(history)
    rows = drawn_layers(len(history.layers))
    across = min(3, len(rows))
    down = -(-len(rows) // across)
    figure = Figure(figsize=(3 + 3 * across, 2.2 + 2 * down), layout="constrained")
    figure.suptitle(f"{title}: tokens of an expert over the mean")
    grid = figure.add_gridspec(1 + down, across)
    norm = LogNorm(_FEWEST, _MOST)
    last = int(history.steps[-1])
    axes = figure.add_subplot(grid[0, :])
    image = _heat_map(axes, load_CLE.max(axis=2).T, last, norm)
    axes.set(title="the most loaded expert of each layer", ylabel="layer")
    ticks = rows[::3] if len(rows) < len(history.layers) else rows
    axes.set_yticks(list(ticks), [str(history.layers[row]) for row in ticks])
    panels = [axes]
    for place, row in enumerate(rows):
        axes = figure.add_subplot(grid[1 + place // across, place % across])
        _heat_map(axes, load_CLE[:, row].T, last, norm)
        axes.set(title=f"layer {history.layers[row]}", xlabel="step", ylabel="expert")
        panels.append(axes)
    bar = figure.colorbar(image, ax=panels, extend="both", ticks=[_FEWEST, 1 / 2, 1, 2, _MOST])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.ax.minorticks_off()
    return figure


def relative_load(history: ExpertLoadHistory) -> Floats:
    """Return the tokens of each expert over the mean of its layer, [C, L, E]: columns at even steps up to the last.

    A column shows the last stored step at or before its own, the first ones the first stored step.
    """
    last = int(history.steps[-1])
    at = np.linspace(last / min(last, _MAX_COLUMNS), last, min(last, _MAX_COLUMNS))
    stored = np.maximum(np.searchsorted(history.steps, at, side="right") - 1, 0)
    counts_CLE = history.counts[stored].astype(np.float64)
    load_CLE: Floats = counts_CLE / np.maximum(counts_CLE.mean(axis=2, keepdims=True), 1e-9)
    return load_CLE


def drawn_layers(layers: int) -> list[int]:
    """Return the indices of the layers whose experts are drawn: at most 12, evenly spaced, with the first and last."""
    return sorted({round(index) for index in np.linspace(0, layers - 1, min(layers, _MAX_LAYERS)).tolist()})


def _heat_map(axes: Any, values: Floats, last_step: int, norm: object) -> Any:
    rows = values.shape[0]
    return axes.imshow(
        np.clip(values, _FEWEST / 2, _MOST * 2),
        aspect="auto",
        interpolation="nearest",
        cmap="coolwarm",
        norm=norm,
        origin="lower",
        extent=(0.5, last_step + 0.5, -0.5, rows - 0.5),
    )
