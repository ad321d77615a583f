"""`megalaunch sweep`: what a dry run says, what it refuses, and a real sweep with a trial that fails."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from launching import events_of, wait_until
from slow_cases import slow_but
from training import make_corpus
from typer.testing import CliRunner
from warm_process import MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.config.compose import compose
from megalaunch.plan.resolve import resolve
from megalaunch.platform.detect import detect_machine
from megalaunch.process import descendants, kill_all
from megalaunch.rundir.outcome import read_outcome
from megalaunch.runs.sweep import run
from megalaunch.runs.sweep.display import LogSweepDisplay
from megalaunch.runs.sweep.folder import SweepFolder
from megalaunch.schema.spec_file import read_spec


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["sweep", *arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep_arguments(folder, *more):
    corpus = make_corpus(folder / "corpus")
    return [
        "recipe=tiny",
        f"data.corpus={corpus}",
        f"data.cache_directory={folder / 'cache'}",
        "platform=cpu",
        "precision=fp32",
        "parallel=dp1",
        *more,
    ]


TWO = "batch.micro_batch_size=2"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("launcher=kubernetes", "a pod needs an image with megalaunch[train]: launcher.kubernetes.image=IMAGE"),
        ("checkpoint.branch_from=nowhere@2", "step_00000002 is not a checkpoint on this machine"),
    ],
)
def test_trials_that_could_not_start_are_refused(folder, override, reason):
    result = invoke("--dry-run", *sweep_arguments(folder, TWO, "optimizer.lr=choice(1e-3,3e-3)", override))
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_tpe_and_a_launcher_exclude_each_other(folder):
    pytest.importorskip("optuna")
    tpe = ("optimizer.lr=1e-3,3e-3", "--sampler", "tpe", "--trials", "2", "launcher=slurm")
    result = invoke(*sweep_arguments(folder, TWO, *tpe))
    assert result.exit_code == 2
    assert (
        "--sampler tpe learns from each trial, and a launcher gets all at once\nfix:  --sampler random" in result.output
    )
    assert not (folder / "sweeps").exists()


def test_a_trial_that_no_point_has_is_refused(folder):
    result = invoke(*sweep_arguments(folder, TWO, "optimizer.lr=1e-3,3e-3", "--trial", "3"))
    assert (result.exit_code, "--trial 3: no valid point of the sweep has this number" in result.output) == (2, True)


def test_a_dry_run_says_what_runs_and_why_the_rest_does_not(folder):
    arguments = sweep_arguments(folder, TWO, "batch.global_batch_size=8,6,7", "optimizer.lr=choice(1e-3,3e-3)")
    result = invoke("--dry-run", *arguments)
    assert result.exit_code == 0, result.output
    assert "6 points: 4 to run, 2 skipped" in result.stdout
    assert "batch.global_batch_size=7 optimizer.lr=0.001  skipped" in result.stdout
    data = json.loads(invoke("--dry-run", "--json", *arguments).stdout)
    assert (data["to_run"], data["skipped"], sum(data["reasons"].values())) == (4, 2, 2)
    assert [point["runs"] for point in data["points"]] == [True] * 4 + [False] * 2
    reason = data["points"][4]["reasons"][0]
    assert reason["severity"] == "error"
    assert reason["rule"] in data["reasons"]
    assert sorted(path.name for path in folder.iterdir()) == ["corpus"]


SWEPT = [
    (["optimizer.lr=1e-3,2e-3"], "validation_loss"),
    (["optimizer.lr=1e-3,2e-3", "batch.micro_batch_size=1,2"], "validation_loss"),
    (["recompute=none,full", "batch.micro_batch_size=1,2"], "tokens_per_second"),
    (["optimizer.lr=1e-3,2e-3", "--metric", "tokens_per_second"], "tokens_per_second"),
]


@pytest.mark.parametrize(
    ("arguments", "metric"),
    slow_but(SWEPT, SWEPT[0], SWEPT[3]),
)
def test_speed_ranks_layouts_and_the_loss_what_is_learned(folder, arguments, metric):
    assert f"ranked by {metric}" in invoke("--dry-run", *sweep_arguments(folder), *arguments).stdout


def test_messages_about_a_trials_data_go_through_the_display(folder, monkeypatch):
    """Printed beside a table that is drawn in place, it would leave a drawing behind."""
    heard = []

    def with_data(planned, say):
        heard.append(say)
        raise typer.Exit(3)

    monkeypatch.setattr(run, "prepare_data", with_data)
    invoke(*sweep_arguments(folder, "optimizer.lr=1e-3,2e-3"))
    assert len(heard) == 2
    assert all(isinstance(say.__self__, LogSweepDisplay) for say in heard)


def test_what_is_wrong_at_every_point_is_said_once(folder):
    """A plan without data yet: the points differ in whether they fit, and that is what their lines say."""
    words = ("recipe=llama3_8b", "data.mock=false", "optimizer.lr=1e-4,2e-4")
    result = invoke("--dry-run", words[0], "batch.micro_batch_size=1,16", *words[1:])
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert sum("data.source" in line for line in lines) == 2  # the sentence, and the count
    assert "  all points: data.source: no training data is given" in result.stdout
    assert lines[0].endswith("no error of its own: only those of all points")
    assert "skipped: memory.fits: a rank needs" in lines[2]
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert refused.stderr.count("data.source: no training data is given") == 1
    assert not (folder / "sweeps").exists()


MOCK = "no training data is given, so the run trains on mock tokens"


def test_a_warning_of_all_points_is_said_once(folder, monkeypatch):
    words = ("recipe=tiny", "platform=cpu", "parallel=dp1", "train.steps=1", "train.steps=2")
    for more in (
        ("optimizer.lr=1e-3,2e-3",),
        ("optimizer.lr=interval(1e-4,1e-3)", "--sampler", "tpe", "--trials", "2"),
    ):
        shown = " ".join(invoke("--dry-run", *words, *more).stdout.split())
        assert shown.count(MOCK) == 1
        assert shown.count("is set 2 times") == 1
    data = json.loads(invoke("--dry-run", "--json", *words, "optimizer.lr=1e-3,2e-3").stdout)
    assert [finding["rule"] for finding in data["warnings"]] == ["data.mock", "config.schema"]

    monkeypatch.setattr(run._TrialRunner, "_trial", lambda self, point: None)  # no trial runs
    for more in (
        ("optimizer.lr=1e-3,2e-3",),
        ("optimizer.lr=interval(1e-4,1e-3)", "--sampler", "tpe", "--trials", "2"),
    ):
        assert " ".join(invoke(*words, *more, f"--name=of{len(more)}").output.split()).count(MOCK) == 1
    assert MOCK not in invoke("--dry-run", *sweep_arguments(folder, "optimizer.lr=1e-3,2e-3")).stdout


def test_a_warning_of_some_points_is_not_said_of_all(folder):
    assert MOCK not in invoke("--dry-run", "recipe=tiny", "data.mock=true,null").stdout


def test_trials_bounds_what_runs(folder):
    result = invoke("--dry-run", "--json", "--trials", "2", *sweep_arguments(folder, "optimizer.lr=1e-3,2e-3,3e-3"))
    assert [point["runs"] for point in json.loads(result.stdout)["points"]] == [True, True, False]
    large = sweep_arguments(folder, "train.seed=range(1,2001)")
    shown = json.loads(invoke("--dry-run", "--json", "--trials", "2", *large).stdout)
    assert (shown["to_run"], len(shown["points"])) == (2, 500)
    arguments = sweep_arguments(folder, "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    drawn = json.loads(invoke("--dry-run", "--json", "--trials", "5", *arguments).stdout)
    assert drawn["sampler"] == "random"
    assert drawn["to_run"] == 5 <= len(drawn["points"])


def test_a_dry_run_of_64_points_is_quick(folder):
    arguments = sweep_arguments(folder, "train.seed=range(1,9)", "optimizer.lr=range(0.001,0.009,step=0.001)")
    started = time.process_time()  # the machine may be busy with other tests
    assert json.loads(invoke("--dry-run", "--json", *arguments).stdout)["to_run"] == 64
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=tiny"], "no override has several values"),
        (["recipe=tiny", "optimizer.lr=1,2", "--metric", "joy"], "--metric tokens_per_second, validation_loss or loss"),
        (["recipe=tiny", "optimizer.lr=1,2", "--sampler", "best"], "--sampler grid"),
        (["recipe=tiny", "optimizer.lr=1,2", "--sampler", "tpe"], "--trials N"),
        (
            ["recipe=tiny", "train.seed=range(10000000)"],
            "range(10000000) has more than 1,000,000 values; use interval(a,b) with --sampler random",
        ),
        (["recipe=tiny", "train.seed=range(1,20001)"], "the grid has 20,000 points, more than 10,000\nfix:  --sampler"),
        (["recipe=tiny", "optimizer.lr=interval(1,2)", "--sampler", "grid"], "--sampler random"),
        (["recipe=tiny", "optimizer.lr=interval(1,2)"], "--trials N"),
        (["recipe=tiny", "optimizer.lr=1,2", "--name", "../x"], "--name"),
    ],
)
def test_what_is_asked_wrongly_is_refused(folder, arguments, said):
    result = invoke("--dry-run", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_sweep_in_which_nothing_can_run_starts_nothing(folder):
    arguments = sweep_arguments(folder, TWO, "batch.global_batch_size=3,7")
    assert invoke("--dry-run", *arguments).exit_code == 2
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "0 to run, 2 skipped" in result.stderr
    assert not (folder / "sweeps").exists()


def test_without_optuna_tpe_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    result = invoke(*sweep_arguments(folder, "optimizer.lr=1e-3,2e-3", "--sampler", "tpe", "--trials", "1"))
    assert result.exit_code == 2
    assert "megalaunch[sweep]" in result.stderr


@pytest.mark.slow
def test_a_launcher_plugin_of_hydra_runs_the_trials(folder):
    """joblib's launcher runs them, two at once; a second call finds nothing to do."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    plugin = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    arguments = sweep_arguments(folder, "train.steps=2", "optimizer.lr=1e-2,1e-3", *plugin)
    for launches in (1, 1):
        done = invoke(*arguments, "--name", "s", "--json")
        assert done.exit_code == 0, done.output
        trials = json.loads(done.stdout)["trials"]
        assert [trial["state"] for trial in trials] == ["done", "done"]
        sweep = SweepFolder(folder / "sweeps" / "s")
        assert [len(events_of(sweep.trial(number), "launch")) for number in (1, 2)] == [launches] * 2
    assert "hydra" not in sweep.trial(1).overrides.read_text()
    tree = invoke(*arguments, "--name", "t", "--sampler", "tpe", "--trials", "2")
    assert (tree.exit_code, "learns from each trial" in tree.stderr) == (2, True)


def test_a_launcher_plugin_that_is_not_installed(folder):
    done = invoke(*sweep_arguments(folder, "optimizer.lr=1e-2,1e-3", "hydra/launcher=nowhere"), "--dry-run")
    assert done.exit_code == 2
    assert "hydra/launcher/nowhere" in done.output


@pytest.mark.slow
def test_a_real_sweep_ranks_what_finished_and_is_continued(folder):
    """Three points: one learns, one blows up after it has measured its speed, one cannot start."""
    arguments = sweep_arguments(folder, "optimizer.weight_decay=0", "train.steps=6", "optimizer.lr=1e-2,1e30,1e-3")
    options = ["--metric", "validation_loss", "--name", "s"]
    first = invoke(*arguments, *options, "--trials", "1")
    assert first.exit_code == 0, first.output
    sweep = SweepFolder(folder / "sweeps" / "s")
    begun = sweep.trial(1).metrics.read_bytes()

    second = invoke(*arguments, *options)
    assert second.exit_code == 0, second.output
    assert "continuing the sweep" in second.stdout
    assert sweep.trial(1).metrics.read_bytes() == begun
    assert len(events_of(sweep.trial(1), "launch")) == 1
    with sweep.results.open(newline="") as file:
        rows = {row["trial"]: row for row in csv.DictReader(file)}
    assert rows["2"]["state"] == "failed"
    assert rows["2"]["rank"] == ""
    assert rows["2"]["exit_code"] == "7"
    assert {rows["1"]["rank"], rows["3"]["rank"]} == {"1", "2"}
    losses = [float(rows[trial]["validation_loss"]) for trial in ("1", "3")]
    assert rows["1" if losses[0] <= losses[1] else "3"]["rank"] == "1"
    assert sweep.plot.read_bytes().startswith(b"\x89PNG")

    best = next(row for row in rows.values() if row["rank"] == "1")
    directory = f"run.directory={sweep.trial(int(best['trial'])).root}"
    again = resolve(compose([f"recipe={sweep.best}", directory]).spec, detect_machine(), None).spec
    frozen = read_spec(sweep.trial(int(best["trial"])).spec)
    assert (again.optimizer, again.parallel.dp, again.batch) == (frozen.optimizer, frozen.parallel.dp, frozen.batch)
    assert again.data.corpus == frozen.data.corpus

    other = invoke(*arguments, "train.seed=5", *options)
    assert other.exit_code == 2
    assert "train.seed=5 is new" in other.stderr


def test_data_that_cannot_be_read_fails_its_trial_alone(folder):
    arguments = [
        argument for argument in sweep_arguments(folder, "train.steps=6") if not argument.startswith("data.corpus")
    ]
    damaged = folder / "damaged.txt"  # one that is missing or empty would be skipped beforehand
    damaged.write_bytes(b"\xff\xff")
    result = invoke(*arguments, f"data.corpus={damaged},{folder / 'corpus'}", "--name", "s", "--json")
    assert result.exit_code == 0, result.output
    trials = {trial["number"]: trial for trial in json.loads(result.stdout)["trials"]}
    assert (trials[1]["state"], trials[1]["rank"]) == ("failed", None)
    assert trials[1]["reason"]
    assert (trials[2]["state"], trials[2]["rank"]) == ("done", 1)


@pytest.mark.slow
def test_ctrl_c_stops_the_trial_resumably(folder):
    arguments = sweep_arguments(folder, "train.steps=100000", "checkpoint.interval=1000", "optimizer.lr=1e-3,2e-3")
    process = subprocess.Popen(
        [*MEGALAUNCH, "sweep", *arguments, "--name", "s"],
        cwd=folder,
        env={**os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sweep = SweepFolder(folder / "sweeps" / "s")
    try:
        wait_until(lambda: sweep.trial(1).metrics.exists() and sweep.trial(1).metrics.stat().st_size > 500, 90)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        left = descendants(process.pid)
        process.kill()
        kill_all(left, 5)
    assert process.returncode == 130, err
    assert "run the same command to continue the sweep" in err
    assert "unfinished" in out
    assert read_outcome(sweep.trial(1).outcome).exit_code == 130
    assert list(sweep.trial(1).checkpoints.iterdir())
    assert not sweep.trial(2).root.exists()
    assert not sweep.lock.exists()
