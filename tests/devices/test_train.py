"""`megalaunch train recipe=quickstart platform=txda`: the whole command on a device that is no CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from training import make_corpus
from txda_device import build_txda
from warm_process import MEGALAUNCH

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

STEPS = 2
SMALL = (
    "recipe=quickstart",
    "tokenizer.vocab_size=300",
    "batch.sequence_length=64",
    "batch.global_batch_size=4",
    f"train.steps={STEPS}",
    "train.validation_interval=1",
    "precision=fp32",
)


def _train(folder: Path, name: str, *more: str) -> None:
    inputs = f"data.corpus={folder / 'corpus'}", f"data.cache_directory={folder / 'cache'}"
    command = [*MEGALAUNCH, "train", *SMALL, *inputs, f"run.directory={folder / name}", *more]
    environment = {**os.environ, "PYTHONPATH": str(build_txda())}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.release  # test_layouts.py and test_resume.py prove the numbers of a device
def test_the_quickstart_trains_as_on_one_cpu(tmp_path):
    make_corpus(tmp_path / "corpus")
    _train(tmp_path, "device", "platform=txda", "parallel=tp2pp2")
    _train(tmp_path, "cpu", "platform=cpu", "parallel=dp1")
    numbers = [list(read_lines(RunDirectory(tmp_path / name).metrics)) for name in ("device", "cpu")]
    assert {line["step"] for line in numbers[0]} == {*range(1, STEPS + 1)}  # a validation has a line of its own
    for ours, theirs in zip(*numbers, strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
