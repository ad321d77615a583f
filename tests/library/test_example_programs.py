"""The programs of docs/examples, started as their pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LOSS = re.compile(r"step +\d+  loss (\d\.\d{4})")
SMALL = ("recipe=tiny", "train.steps=3", "batch.sequence_length=32", "batch.global_batch_size=4", "model.num_layers=2")


def start(program: str, *arguments: str, processes: int, folder: Path) -> list[float]:
    """The losses that a program prints, started by torchrun outside the checkout, as an installed package is used."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(ROOT / "docs" / "examples" / program)]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    losses = [float(loss) for loss in LOSS.findall(done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.slow
def test_the_training_loop_starts_under_torchrun_and_saves(tmp_path: Path) -> None:
    start("training_loop.py", *SMALL, "parallel=tp2", "train.steps=3", processes=2, folder=tmp_path)
    assert json.loads((tmp_path / "checkpoints" / "step-3" / "position.json").read_text())["step"] == 3


@pytest.mark.slow
def test_the_own_block_starts_under_torchrun(tmp_path: Path) -> None:
    start("own_block.py", *SMALL, "parallel=tp2pp2", processes=4, folder=tmp_path)


@pytest.mark.slow
def test_own_data_starts_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the program reads a Hugging Face data set")
    texts = [f"the {number} of {number % 7} and the rest of the words" for number in range(400)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    start("own_data.py", "corpus.jsonl", "tokenizer.json", *SMALL, "parallel=tp2", processes=2, folder=tmp_path)
