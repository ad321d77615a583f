"""`torchrun -m megalaunch train ...` says in one sentence what to type instead, and starts nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from megalaunch.cli import main, torchrun

WORKER = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("arguments", "environment", "typed"),
    [
        (["train", "recipe=tiny"], {}, "megalaunch train recipe=tiny cluster.devices_per_node=4"),
        (["train", "cluster.devices_per_node=2"], {}, "megalaunch train cluster.devices_per_node=2"),
        (["train", "run.name=a b"], {}, "megalaunch train 'run.name=a b' cluster.devices_per_node=4"),
        (["generate", "runs/x", "--prompt", "a b"], {}, "megalaunch generate runs/x --prompt 'a b'"),
        (
            ["train", "recipe=tiny"],
            {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "8"},
            "megalaunch train recipe=tiny cluster.nodes=2 cluster.devices_per_node=4 --prepare-only on one machine, "
            "then on each machine the command that it prints",
        ),
    ],
)
def test_what_to_type(arguments, environment, typed):
    given = {**WORKER, **environment}
    assert torchrun.is_torchrun_worker(arguments, given)
    started = f"torchrun started megalaunch {given['WORLD_SIZE']} times"
    assert torchrun.advice(arguments, given) == (f"error: {started}, but it starts its workers itself; type: {typed}")


def test_who_is_no_worker_of_torchrun():
    assert not torchrun.is_torchrun_worker(["train"], {"RANK": "0"})
    assert not torchrun.is_torchrun_worker(["doctor"], WORKER)
    assert not torchrun.is_torchrun_worker([], WORKER)


def test_only_one_worker_of_a_machine_speaks(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(torchrun.time, "sleep", waited.append)
    monkeypatch.setattr(sys, "argv", ["megalaunch", "train", "recipe=tiny"])
    for local_rank in ("0", "1"):
        for key, value in {**WORKER, "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(SystemExit) as end:
            main.main()
        assert end.value.code == 2
    assert capsys.readouterr().err.count("error: torchrun started megalaunch 4 times") == 1
    assert len(waited) == 1


def test_under_the_real_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    arguments = ["-m", "megalaunch", "train", "recipe=tiny"]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1  # torchrun's own, for any failed worker
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == [torchrun.advice(arguments[2:], {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})]
    assert shlex.split(told[0].partition("type: ")[2])[0] == "megalaunch"
    assert list(tmp_path.iterdir()) == []
