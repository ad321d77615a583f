"""lm-eval with a model of ours finds what it finds with the same weights in its own model `hf`."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import yaml
from harness_tasks import write_model, write_tasks
from slow_cases import slow_but
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli.app import app

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'megalaunch[lm-eval]')")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval") / "tasks"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OFFLINE, "HF_HOME": str(folder.parent / "hf")}.items():
            patch.setenv(name, value)
        yield folder, write_tasks(folder)


@pytest.fixture(scope="module", params=slow_but(["begins", "plain"], "begins"))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "hf"
    write_model(path, begins=request.param == "begins")
    return path


@pytest.fixture
def own_tasks_only(monkeypatch):
    """lm-eval reads thousands of its own tasks before it finds ours, 10 seconds each time."""
    from lm_eval.tasks import TaskManager

    for module in ("megalaunch.engine.lm_eval_adapter", "lm_eval.tasks"):
        monkeypatch.setattr(f"{module}.TaskManager", partial(TaskManager, include_defaults=False))


def evaluated(model, tasks, model_args: dict) -> dict:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks[0]), include_defaults=False)
    return simple_evaluate(
        model, model_args, tasks[1], batch_size=5, device="cpu", task_manager=manager, bootstrap_iters=0
    )


def test_figures_and_every_answer_are_those_of_hf(folder, tasks):
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'lm-eval[hf]')")
    import megalaunch.engine.lm_eval_adapter  # noqa: F401  # adds the model

    theirs = evaluated("hf", tasks, {"pretrained": str(folder), "dtype": "float32"})
    ours = evaluated("megalaunch", tasks, {"pretrained": str(folder)})
    for task, figures in theirs["results"].items():
        numbers = {key: value for key, value in figures.items() if isinstance(value, float)}
        assert numbers
        assert {key: ours["results"][task][key] for key in numbers} == pytest.approx(numbers, abs=1e-3)
    assert 0 < theirs["results"]["local_writing"]["exact_match,vowel"] < 1
    answers = {task: [row["resps"] for row in theirs["samples"][task]] for task in tasks[1]}
    found = {task: [row["resps"] for row in ours["samples"][task]] for task in tasks[1]}
    assert found["local_writing"] == answers["local_writing"]
    assert len({text for ((text,),) in answers["local_writing"]}) > 6, "the texts must differ to prove anything"
    for mine, other in zip(found["local_choice"], answers["local_choice"], strict=True):
        for (mine_logprob, mine_greedy), (logprob, greedy) in zip(flat(mine), flat(other), strict=True):
            assert (float(mine_logprob), mine_greedy) == (pytest.approx(float(logprob), abs=1e-3), greedy)
    for mine, other in zip(found["local_reading"], answers["local_reading"], strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-3)


def flat(responses: list) -> list:
    return [answer for (answer,) in responses]


@pytest.mark.slow
def test_commands(tasks, tmp_path, own_tasks_only, monkeypatch):
    """`megalaunch evaluate --task` and lm-eval's own command line find the same of a run of ours."""
    from lm_eval.__main__ import cli_evaluate

    run = str(make_run(tmp_path / "run", steps=(1,)).root)
    arguments = [argument for name in tasks[1] for argument in ("--task", name)]
    shown = CliRunner().invoke(
        app, ["evaluate", run, "--include-path", str(tasks[0]), "--limit", "5", "--json", *arguments]
    )
    assert shown.exit_code == 0, shown.output
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    figures = {(record["task"], f"{record['metric']},{record['filter']}"): record["value"] for record in records}
    assert {task for task, _ in figures} == {*tasks[1]}
    assert {record["samples"] for record in records} == {5}
    options = ["--model_args", f"pretrained={run}", "--limit", "5", "--output_path", str(tmp_path / "out")]
    options += ["--tasks", ",".join(tasks[1]), "--include_path", str(tasks[0])]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "megalaunch", *options])
    cli_evaluate()  # as `python -m megalaunch.engine.lm_eval_adapter` does
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    theirs = {(task, key): found["results"][task][key] for task, key in figures}
    assert figures == pytest.approx(theirs, abs=1e-6)


def test_refusals(tasks, tmp_path, own_tasks_only):
    write_model(tmp_path / "hf", begins=False)
    (tasks[0] / "long.yaml").write_text(
        yaml.safe_dump({"include": "local_writing.yaml", "task": "long"} | wish(max_gen_toks=48))
    )
    (tasks[0] / "beams.yaml").write_text(
        yaml.safe_dump({"include": "local_writing.yaml", "task": "beams"} | wish(num_beams=2))
    )
    missing = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "nowhere.jsonl")}}}
    (tasks[0] / "gone.yaml").write_text(yaml.safe_dump({"include": "local_writing.yaml", "task": "gone"} | missing))
    for name, code, reason in [
        ("nix", 2, "lm-eval has no task nix"),
        ("long", 2, "max_gen_toks=48 leaves no room for a prompt in the 48 tokens"),
        ("beams", 2, "num_beams is unknown"),
        ("gone", 3, "nowhere.jsonl"),
    ]:
        arguments = ["evaluate", str(tmp_path / "hf"), "--task", name, "--include-path", str(tasks[0])]
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, reason in result.stderr) == (code, True), result.output
    for arguments, reason in [
        ({"batch_size": "auto"}, "batch_size must be a number"),
        ({"max_length": 99}, "from 1 to the 48"),
    ]:
        from megalaunch.engine.lm_eval_adapter import LMEvalModel

        with pytest.raises(ValueError, match=reason):
            LMEvalModel(tmp_path / "hf", **arguments)


def wish(**values: int) -> dict:
    return {"generation_kwargs": {"until": ["s"], **values}}
