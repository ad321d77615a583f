"""`megalaunch report`: one self-contained HTML page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.installation import install_command

if TYPE_CHECKING:
    from megalaunch.runs.report.content import RunContent
    from megalaunch.runs.sweep.folder import Metric

_MOST_RUNS = 100


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories, or folders with runs such as a sweep's."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page to write (default: report.html in the first RUN_DIR)."),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="What ranks several runs: validation_loss, loss or tokens_per_second.")
    ] = "validation_loss",
) -> None:
    """Write one HTML page about a run: curves, time line, experts, settings; several runs are compared.

    The page needs no other file and no network. Example: megalaunch report runs/base
    """
    from megalaunch.fs import write_file_atomically
    from megalaunch.runs.errors import fail
    from megalaunch.runs.report.page import render_report

    checked = _check_metric(metric)
    contents = _read_runs(paths)
    title = contents[0].name if len(contents) == 1 else f"{len(contents)} runs: {', '.join(map(str, paths))}"
    target = out or paths[0] / "report.html"
    try:
        page = render_report(title, contents, checked)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        fail(f"{package} is not installed, and draws the page: {install_command('megalaunch[train]')}")
    try:
        write_file_atomically(target, page.encode())
    except OSError as error:
        fail(f"{target} cannot be written ({error.strerror}): give another file with --out")
    typer.echo(str(target))


def _check_metric(metric: str) -> Metric:
    from typing import get_args

    from megalaunch.runs.errors import fail
    from megalaunch.runs.sweep.folder import Metric

    for known in get_args(Metric):
        if metric == known:
            return known  # type: ignore[no-any-return]
    fail(f"--metric {metric} is not known: give {', '.join(get_args(Metric))}")


def _read_runs(paths: list[Path]) -> list[RunContent]:
    from megalaunch.runs.catalog.find import find_runs
    from megalaunch.runs.errors import fail
    from megalaunch.runs.report.content import read_content
    from megalaunch.schema import SpecError

    contents = []
    for path in paths:
        try:
            runs = list(find_runs(path))
        except OSError as error:
            fail(f"{path} cannot be read ({error.strerror}): name a run directory, such as runs/NAME")
        if not runs:
            fail(f"{path} is no run directory and has none below it: no spec.yaml was found")
        for run in runs:
            name = str(run.root.relative_to(path)) if run.root != path else path.resolve().name
            try:
                contents.append(read_content(run, name))
            except (SpecError, OSError) as error:
                fail(f"{run.root}: {error}")
    if len(contents) > _MOST_RUNS:
        fail(f"{len(contents)} runs are too many for one page: name at most {_MOST_RUNS}")
    return contents
