"""Draw what a user sees of a run, by the display and the plot themselves, from the files of one real run.

`recorded_run` holds the spec and the metrics of `megalaunch train recipe=tiny data.corpus=/usr/share/common-licenses
run.name=licences train.steps=200`, with a relative directory in the spec.
"""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import matplotlib
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from megalaunch.launch import run_state
from megalaunch.launch.display.live_display import panel
from megalaunch.launch.display.plot import loss_figure
from megalaunch.launch.run_state import RunState, number, throughput_basis
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.metrics import is_validation
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.spec_file import read_spec

RECORDED = Path(__file__).parent / "recorded_run"
_STEP = 130  # at which the display is shown
_COLUMNS = 72


def display() -> str:
    """Return the panel of the live display in the middle of the run, as rich's SVG of a terminal."""
    lines = (RECORDED / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records = list(read_lines(RECORDED / "metrics.jsonl"))
    shown = list(itertools.takewhile(lambda pair: number(pair[1], "step") <= _STEP, zip(lines, records, strict=True)))
    seconds = sum(number(record, "step_seconds") for _, record in shown if "loss" in record)
    clock = SimpleNamespace(time=lambda: seconds, monotonic=lambda: seconds)
    spec = read_spec(RECORDED / "spec.yaml")
    with tempfile.TemporaryDirectory() as folder, patch.object(run_state, "time", clock):
        shutil.copy(RECORDED / "spec.yaml", folder)
        directory = RunDirectory(Path(folder))
        directory.events.write_text(
            '{"time": 0, "event": "launch"}\n{"time": 0, "event": "phase", "phase": "training"}\n'
        )
        directory.metrics.write_text("".join(line for line, _ in shown))
        state = RunState(spec, directory, throughput_basis(spec), attach=True)
        state.directory = RunDirectory(Path(spec.run.directory or ""))
        console = Console(
            record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", _environ={}
        )
        console.print(panel(state, _COLUMNS))
    start, end = CONSOLE_SVG_FORMAT.index("@font-face"), CONSOLE_SVG_FORMAT.index(".{unique_id}-matrix")
    offline = CONSOLE_SVG_FORMAT[:start] + CONSOLE_SVG_FORMAT[end:]  # rich would load a font from another site
    svg = console.export_svg(title="megalaunch train", code_format=offline, unique_id="display")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def loss_plot() -> str:
    """Return plots/loss.png of the run as SVG."""
    records = list(read_lines(RECORDED / "metrics.jsonl"))
    assert any(is_validation(record) for record in records)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "megalaunch", "svg.fonttype": "none"}):
        loss_figure(records, "licences").savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
