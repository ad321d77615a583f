"""`megalaunch report`: a self-contained page about runs."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from local_shards import write_local_shard
from tiny_run import tiny_spec
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.report.importance import independent_settings
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import write_spec

RESOLVED = {"cluster.nodes": 1, "cluster.devices_per_node": 1}
EVIL = "<script>alert('x')</script>"


def call(*arguments: object):
    return CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])


def plain_run(root: Path, steps: int = 20, **values: object) -> RunDirectory:
    """A finished run without checkpoints whose loss depends on its learning rate."""
    run = RunDirectory(root)
    run.checkpoints.mkdir(parents=True)
    spec = with_values(tiny_spec(), RESOLVED | {"train.steps": 20, **values})
    write_spec(spec, run.spec)
    record_event(run, "launch", overrides=["train.steps=20", f"run.name={EVIL}"], workers=1, command=[])
    record_event(run, "phase", phase="training", step=0)
    for step in range(1, steps + 1):
        loss = 5.0 - 0.05 * step + 100 * spec.optimizer.lr
        metrics = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 128 * step, "tokens_per_second": 1000.0}
        append_line(run.metrics, {"step": step, "loss": loss, **metrics, "step_seconds": 0.1, "memory_bytes": 2**30})
        if step % 10 == 0:
            append_line(run.metrics, {"step": step, "validation_loss": loss + 0.5})
    record_event(run, "worker_failed", rank=0, step=5, exception="OSError", message=EVIL)
    write_outcome(run.outcome, Outcome(ExitCode.DONE, "completed", steps))
    record_event(run, "outcome", exit_code=0, reason="completed")
    run.sample.write_text(f"the cat {EVIL}")
    return run


class Page(HTMLParser):
    """The parts of a page: tags, texts, and the addresses that it names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.images: list[str] = []
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        if tag == "img":
            assert values["alt"]
            self.images.append(values["src"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "dd", "dt", "th"):
            self.cells.append(data.strip())


def svg_texts(uri: str) -> set[str]:
    kind, _, data = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return {
        text.text or "" for text in ElementTree.fromstring(base64.b64decode(data)).iter() if text.tag.endswith("text")
    }


def test_a_page_needs_nothing_else_and_escapes_every_text(tmp_path: Path):
    run = plain_run(tmp_path / "one")
    result = call(run.root)
    assert (result.exit_code, result.stdout) == (0, f"{run.root / 'report.html'}\n")
    html = (run.root / "report.html").read_text()
    page = Page(html)
    assert page.open == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert html.count("&lt;script&gt;") >= 3  # overrides, event, sample
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", html)
    assert {"Loss", "Throughput", "Timeline", "Memory"} <= set(re.findall(r"<figcaption>(.*?)</figcaption>", html))
    assert {"training", "validation", "loss (nats per token)"} <= svg_texts(page.images[0])


def test_the_facts_of_a_run(tmp_path: Path):
    page = Page((call(plain_run(tmp_path / "one").root), (tmp_path / "one" / "report.html").read_text())[1])
    facts = dict(zip(page.cells[0::2], page.cells[1::2], strict=False))
    assert facts["state"] == "finished"
    assert facts["step"] == "20 of 20"
    assert facts["validation loss"] == "4.5300"
    assert facts["tokens/s, median"] == "1,000"
    assert facts["memory"] == "1.0 GiB"
    row = page.cells.index("train.steps")
    assert page.cells[row + 1 : row + 3] == ["20", "command line"]
    row = page.cells.index("model.hidden_size")
    assert page.cells[row + 1 : row + 3] == ["32", "recipe"]
    row = page.cells.index("optimizer.beta1") if "optimizer.beta1" in page.cells else page.cells.index("train.seed")
    assert page.cells[row + 2] == "default"


@pytest.mark.slow
def test_several_runs_are_compared(tmp_path: Path):
    for index in range(9):
        lr = 0.001 * (1 + index)
        derived = {"schedule.min_lr": lr / 10, "run.name": f"lr{index}"}
        plain_run(tmp_path / f"lr{index}", **{"optimizer.lr": lr, **derived})
    out = tmp_path / "all.html"
    assert call(tmp_path, "--out", out).exit_code == 0
    html = out.read_text()
    page = Page(html)
    assert "optimizer.lr" in page.cells
    assert page.cells[page.cells.index("optimizer.lr") + 1] == "0.001"
    assert "Settings and results" in html
    assert "Importance for the validation loss" in html
    assert page.cells[page.cells.index("share") + 1 :][:2] == ["optimizer.lr", "100%"]
    [coordinates] = [uri for uri in page.images if "optimizer.lr" in svg_texts(uri)]
    assert "validation loss" in svg_texts(coordinates)
    assert "schedule.min_lr" not in svg_texts(coordinates)  # follows from the learning rate


def test_the_runs_are_ranked(tmp_path: Path):
    for name, lr in (("a", 0.003), ("b", 0.001), ("c", 0.002)):
        plain_run(tmp_path / name, **{"optimizer.lr": lr, "run.name": name})
    plain_run(tmp_path / "new", steps=0)
    assert call(tmp_path, "--out", tmp_path / "all.html").exit_code == 0
    table = (tmp_path / "all.html").read_text().partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r"<tr><td>(\w+)</td>", table) == ["b", "c", "a", "new"]


@pytest.mark.parametrize(("typed", "kept"), [((), "optimizer.lr"), (("schedule.min_lr",), "schedule.min_lr")])
def test_of_settings_that_change_together_one_is_kept(typed, kept):
    settings = [
        ("optimizer.lr", [1, 1, 2]),
        ("schedule.min_lr", [0.1, 0.1, 0.2]),
        ("train.seed", [7, 7, 7]),
        ("data.path", ["a", "b", "b"]),
    ]
    assert [key for key, _ in independent_settings(settings, typed)] == [kept, "data.path"]


def test_a_run_without_a_step_has_a_page(tmp_path: Path):
    run = RunDirectory(tmp_path / "new")
    run.checkpoints.mkdir(parents=True)
    write_spec(with_values(tiny_spec(), RESOLVED), run.spec)
    assert call(run.root).exit_code == 0
    page = Page((run.root / "report.html").read_text())
    assert page.images == []
    assert "new" in page.cells


def test_local_checkpoints_on_the_machine_are_listed(tmp_path: Path):
    run = plain_run(tmp_path / "one", 1, **{"checkpoint.memory.path": str(tmp_path), "cluster.devices_per_node": 1})
    write_local_shard(tmp_path, run, 1, 14)
    call(run.root)
    assert any(
        cell.startswith("step 14 of node 1 in memory (") for cell in Page((run.root / "report.html").read_text()).cells
    )


def test_the_same_run_gives_the_same_charts(tmp_path: Path):
    run = plain_run(tmp_path / "one")
    pages = []
    for _ in range(2):
        call(run.root)
        pages.append(Page((run.root / "report.html").read_text()).images)
    assert pages[0] == pages[1]


def test_what_cannot_be_reported_is_refused(tmp_path: Path):
    run = plain_run(tmp_path / "one", steps=1)
    for arguments, expected in (
        (
            [tmp_path / "none"],
            "none cannot be read (No such file or directory): name a run directory",
        ),
        ([run.checkpoints], "is no run directory and has none below it: no spec.yaml was found"),
        ([run.root, "--metric", "speed"], "speed is not known: give tokens_per_second, validation_loss, loss"),
        (
            [run.root, "--out", "/proc/x.html"],
            "/proc/x.html cannot be written (No such file or directory): give",
        ),
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert expected in result.stderr
    run.spec.write_text("nonsense: [")
    assert call(run.root).exit_code == 2


def test_the_missing_extra_is_named(tmp_path: Path):
    run = plain_run(tmp_path / "one", steps=1)
    code = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from megalaunch.cli.main import main\nsys.argv[0] = 'megalaunch'\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "report", str(run.root)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr == "error: matplotlib is not installed, and draws the page: pip install 'megalaunch[train]'\n"
