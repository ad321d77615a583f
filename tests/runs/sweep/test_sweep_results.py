"""What trials come to: only finished ones rank, by the median of steady steps or the last validation loss."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from made_specs import LAPTOP
from slow_cases import slow_but

from megalaunch.config.compose import compose
from megalaunch.config.write_recipe import recipe_text
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.runs.sweep.folder import (
    Definition,
    SweepFolder,
    SweepFolderError,
    open_folder,
    record_started,
    started_trials,
)
from megalaunch.runs.sweep.overrides import parse_sweep
from megalaunch.runs.sweep.plan import PointValidator
from megalaunch.runs.sweep.results import (
    draw_results,
    rank_results,
    read_result,
    read_speed,
    unranked_reason,
    write_results,
)
from megalaunch.runs.sweep.sampling import grid


def made_trial(folder, number, rate, code=ExitCode.DONE, validation=None, steps=12):
    directory = folder.trial(number)
    directory.root.mkdir(parents=True)
    for step in range(1, steps + 1):
        first = step <= 2
        rate_now = rate / 10 if first else rate + step
        record = {"step": step, "loss": 3.0, "step_seconds": 0.5, "tokens_per_second": rate_now}
        append_line(directory.metrics, record)
    if validation is not None:
        append_line(directory.metrics, {"step": steps, "validation_loss": validation})
    if code is not None:
        write_outcome(directory.outcome, Outcome(int(code), "it was so", steps))
    return read_result(number, {"optimizer.lr": str(number)}, directory)


def test_the_first_steps_do_not_count_and_the_spread_is_the_middle_half():
    steps = [{"tokens_per_second": rate} for rate in (1, 1, 10, 20, 30, 40, 50)]
    speed = read_speed(steps)
    assert (speed.median, speed.low, speed.high, speed.steps) == (30, 20, 40, 5)
    assert read_speed(steps[:3]) is None


def test_a_failed_or_unfinished_trial_never_ranks(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    slow = made_trial(folder, 1, 100.0)
    fast = made_trial(folder, 2, 200.0)
    crashed = made_trial(folder, 3, 900.0, ExitCode.CRASH)
    stopped = made_trial(folder, 4, 800.0, ExitCode.INTERRUPTED)
    killed = made_trial(folder, 5, 700.0, None)
    short = made_trial(folder, 6, 600.0, steps=3)
    results = [slow, fast, crashed, stopped, killed, short]
    assert [result.number for result in rank_results(results, "tokens_per_second")] == [2, 1]
    assert [result.state for result in results] == ["done", "done", "failed", "unfinished", "unfinished", "done"]
    assert unranked_reason(crashed, "tokens_per_second") == "it was so"
    assert "too few" in unranked_reason(short, "tokens_per_second")
    assert read_result(7, {}, folder.trial(7)).state == "waiting"


def test_the_lowest_validation_loss_wins_and_nan_never_ranks(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    results = [
        made_trial(folder, 1, 100.0, validation=2.5),
        made_trial(folder, 2, 200.0, validation=2.4),
        made_trial(folder, 3, 300.0, validation=float("nan")),
        made_trial(folder, 4, 300.0, validation=float("inf")),
        made_trial(folder, 5, 300.0),
    ]
    assert [result.number for result in rank_results(results, "validation_loss")] == [2, 1]
    assert "--metric loss to rank by the training loss" in unranked_reason(results[4], "validation_loss")
    assert unranked_reason(results[2], "validation_loss") == "validation loss not finite"


def test_a_trial_that_diverged_is_not_ranked_by_an_earlier_validation(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    made_trial(folder, 1, 100.0, validation=1.5)
    append_line(folder.trial(1).metrics, {"step": 12, "validation_loss": float("nan")})
    append_line(folder.trial(1).metrics, {"step": 12, "tasks": {}})  # without a validation
    diverged = read_result(1, {"optimizer.lr": "1"}, folder.trial(1))
    assert rank_results([diverged], "validation_loss") == []


def test_the_training_loss_ranks_where_it_is_asked_for(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    results = [made_trial(folder, number, 100.0) for number in (1, 2)]
    results = [replace(results[0], loss=3.0), replace(results[1], loss=2.0), replace(results[1], loss=float("nan"))]
    assert [result.loss for result in rank_results(results, "loss")] == [2.0, 3.0]
    assert unranked_reason(results[2], "loss") == "the last training loss is not finite"


def test_the_table_holds_every_point_the_best_first(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    sweep = parse_sweep(["recipe=tiny", "optimizer.lr=1,2", "batch.global_batch_size=7"])
    judge = PointValidator(sweep, folder, LAPTOP, False)
    skipped = [judge.validate(number, values) for number, values in enumerate(grid(sweep.axes), 8)]
    results = [made_trial(folder, 1, 100.0), made_trial(folder, 2, 200.0), made_trial(folder, 3, 9.0, ExitCode.HANG)]
    write_results(folder, results, skipped, "tokens_per_second")
    with folder.results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["trial"], row["state"]) for row in rows] == [
        ("1", "2", "done"),
        ("2", "1", "done"),
        ("", "3", "failed"),
        ("", "8", "skipped"),
        ("", "9", "skipped"),
    ]
    assert rows[0]["tokens_per_second"] == "207.5"
    assert rows[3]["reason"].count(":") >= 1
    assert draw_results(folder, results, "tokens_per_second").read_bytes().startswith(b"\x89PNG")
    assert draw_results(folder, results[2:], "tokens_per_second") is None


def test_a_sweep_is_continued_only_as_itself(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    definition = Definition(("recipe=tiny", "optimizer.lr=1,2"), "grid", 1, "validation_loss")
    assert open_folder(folder, definition) is False
    assert open_folder(folder, definition) is True
    again = Definition(definition.overrides, "grid", 2, "tokens_per_second")  # a grid has no seed, a metric only ranks
    assert open_folder(folder, again) is True
    other = Definition(("recipe=tiny", "optimizer.lr=1,3"), "random", 1, "validation_loss")
    with pytest.raises(SweepFolderError) as refused:
        open_folder(folder, other)
    assert "optimizer.lr=1,3 is new" in str(refused.value)
    assert "--sampler was grid and is random" in str(refused.value)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(SweepFolderError, match="is not a sweep"):
        open_folder(SweepFolder(tmp_path / "mine"), definition)


def test_what_was_begun_is_remembered_once(tmp_path):
    folder = SweepFolder(tmp_path)
    for _ in range(2):
        record_started(folder, 4, {"parallel": "tp2"})
    assert started_trials(folder) == {4: {"parallel": "tp2"}}
    assert len(folder.started.read_text().splitlines()) == 1


def test_points_that_come_to_the_same_run_run_once(tmp_path):
    sweep = parse_sweep(["recipe=tiny", "platform=cpu", "data.corpus=python-stdlib", "parallel=dp1,dp2,tp1"])
    judge = PointValidator(sweep, SweepFolder(tmp_path / "s"), LAPTOP, False)
    judged = [judge.validate(number, values) for number, values in enumerate(grid(sweep.axes), 1)]
    assert [point.is_valid for point in judged] == [True, True, False]  # two workers where the layout leaves it open
    assert "the same run as point 2" in judged[2].reasons[0].message


COMPOSED = [
    ["recipe=tiny", "parallel=tp2", "optimizer.lr=3e-3"],
    ["recipe=llama3_8b", "parallel.tp=4", "precision.compute_dtype=fp32", "parallel.sequence_parallel=true"],
    ["recipe=llama3_8b", "recompute=selective", "recompute.modules=[mlp,norm]", "batch.micro_batch_size=null"],
    ["recipe=quickstart", "parallel.schedule=gpipe", "train.sample_prompt='a: b'"],
]


@pytest.mark.parametrize(
    "overrides",
    slow_but(COMPOSED, COMPOSED[2]),
)
def test_a_composition_written_as_a_recipe_composes_to_the_same_spec(tmp_path, overrides):
    composition = compose([*overrides, "run.name=x", f"run.directory={tmp_path}"])
    recipe = recipe_text(composition, "mine", "overrides")
    path = tmp_path / "best.yaml"
    path.write_text(recipe.text)
    for name, text in recipe.option_files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    again = compose([f"recipe={path}", "run.name=x", f"run.directory={tmp_path}"])
    assert again.spec == composition.spec
    assert list(recipe.option_files) == (["conf/parallel/mine.yaml"] if "parallel.schedule=gpipe" in overrides else [])
