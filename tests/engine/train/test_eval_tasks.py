"""lm-eval tasks during training: the scores of the saved checkpoint, and training does not notice them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness_tasks import write_tasks
from looped_run import run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.data.tokenizer.tokenizer import train_tokenizer
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.metrics import is_task_evaluation, task_scores
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

pytest.importorskip("lm_eval", reason="lm-eval (the extra `lm-eval`) is not installed")

TASKS = ("local_choice", "local_writing", "local_reading")


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = train_tokenizer(
        ["the old red house stands under a small tree and never falls; a bird sings by the river. " * 9],
        320,
        folder / "tokenizer.json",
    )
    assert tuple(write_tasks(folder / "tasks")) == TASKS
    return with_values(
        ten_steps(folder),
        {
            "model.vocab_size": tokenizer.vocab_size,
            "model.max_position_embeddings": 48,
            "model.init_std": 0.3,
            "tokenizer.path": str(folder / "tokenizer.json"),
            "train.steps": 3,
            "train.validation_interval": 0,
            "train.eval_tasks.names": TASKS,
            "train.eval_tasks.interval": 2,
            "train.eval_tasks.batch_size": 3,
            "train.eval_tasks.limit": 5,
            "train.eval_tasks.include_path": str(folder / "tasks"),
        },
    )


def lines(root: Path) -> list[dict]:
    return list(read_lines(RunDirectory(root).metrics))


LAYOUTS = [
    {},
    {"parallel.dp": 1, "parallel.tp": 2, "parallel.sequence_parallel": True, "batch.micro_batch_size": 1},
    {"parallel.dp": 1, "parallel.pp": 2, "parallel.schedule": "1f1b", "model.num_layers": 2},
    {"parallel.dp": 1, "parallel.cp": 2, "batch.micro_batch_size": 1},
]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, LAYOUTS[0], every=[LAYOUTS[2]]))
def test_the_scores_are_those_of_the_checkpoint_and_training_stays_the_same(spec, tmp_path, layout):
    from megalaunch.engine.inference.load_model import open_model
    from megalaunch.engine.lm_eval_adapter import task_scores as scores_of_checkpoint

    spec = with_values(spec, layout)
    assert run_loop(spec, tmp_path / "tasks", timeout=300).reason == "finished all 3 steps"
    run_loop(with_values(spec, {"train.eval_tasks.names": ()}), tmp_path / "plain")
    losses = [[line["loss"] for line in lines(tmp_path / root) if "loss" in line] for root in ("tasks", "plain")]
    assert losses[0] == losses[1]  # to the bit

    found = [line for line in lines(tmp_path / "tasks") if is_task_evaluation(line)]
    assert [line["step"] for line in found] == [2, 3]
    model = open_model(RunDirectory(tmp_path / "tasks").checkpoint(3), device=torch.device("cpu"))
    folder = Path(spec.train.eval_tasks.include_path)
    expected = {
        f"{one.task}/{one.metric}" + ("" if one.filter == "none" else f",{one.filter}"): one.value
        for one in scores_of_checkpoint(model, TASKS, folder, None, 5, 2, None)
    }
    assert task_scores(found[-1]) == pytest.approx(expected, rel=1e-4)
    assert task_scores(found[0]) != task_scores(found[1])


def test_of_tasks_in_a_folder_only_the_folder_is_read(spec):
    """lm-eval's own tasks are thousands of files; a name that the folder lacks needs them, as the next test shows."""
    from megalaunch.engine.lm_eval_adapter import index_tasks

    assert index_tasks(TASKS, Path(spec.train.eval_tasks.include_path)).all_tasks == sorted(TASKS)


def test_a_continuation_that_is_longer_than_a_row_ends_the_run(spec, tmp_path):
    """lm-eval's `hf` truncates contexts only, and refuses such a continuation; evaluate refuses it alike."""
    values = {"train.eval_tasks.names": ("local_choice",), "model.max_position_embeddings": 4}
    end = run_loop(with_values(spec, {**values, "batch.sequence_length": 4}), tmp_path)
    assert (end.exit_code, end.step) == (ExitCode.DATA, 2)
    reason = r"train\.eval_tasks: the continuation of pair \d+ has \d+ tokens, more than the 4 that fit a row; only .*"
    assert re.fullmatch(reason, end.reason)


@pytest.mark.slow
@pytest.mark.release  # tests/parity/test_harness.py refuses it by name
def test_an_unknown_task_ends_the_run_before_its_first_step(spec, tmp_path):
    end = run_loop(with_values(spec, {"train.eval_tasks.names": ("no_such_task",)}), tmp_path, timeout=300)
    assert (end.exit_code, end.step) == (ExitCode.CONFIGURATION, 0)
    assert end.reason.startswith("train.eval_tasks.names: lm-eval has no task no_such_task")
