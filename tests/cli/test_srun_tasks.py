"""`srun` with several tasks per node says in one sentence what to type instead, and starts nothing."""

from __future__ import annotations

import sys

import pytest

from megalaunch.cli import main, srun_tasks

STEP = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0"}


def test_what_to_type():
    assert srun_tasks.is_one_of_several_tasks(["train", "run.name=a b"], STEP)
    assert srun_tasks.advice(["train", "run.name=a b"], STEP) == (
        "error: srun started megalaunch 16 times on 2 nodes, but it starts its workers itself; "
        "type: srun --nodes=2 --ntasks=2 megalaunch train 'run.name=a b'"
    )


def test_one_task_per_node_and_commands_without_workers_may_run():
    assert not srun_tasks.is_one_of_several_tasks(["train"], {**STEP, "SLURM_STEP_NUM_TASKS": "2"})
    assert not srun_tasks.is_one_of_several_tasks(["doctor"], STEP)
    assert not srun_tasks.is_one_of_several_tasks(["train"], {})


def test_only_the_first_task_speaks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megalaunch", "train", "recipe=tiny"])
    for task in ("0", "1"):
        for key, value in {**STEP, "SLURM_PROCID": task}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(SystemExit) as end:
            main.main()
        assert end.value.code == 2
    assert capsys.readouterr().err.count("error: srun started") == 1
