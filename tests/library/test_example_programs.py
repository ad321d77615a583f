"""The programs of docs/examples, started as their pages say, with megalaunch installed from its wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LOSS = re.compile(r"step +\d+  loss (\d\.\d{4})")
SMALL = ("recipe=tiny", "train.steps=3", "batch.sequence_length=32", "batch.global_batch_size=4", "model.num_layers=2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the wheel: in front of the checkout on sys.path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True, timeout=300)
    install = ["-m", "pip", "install", "--no-deps", "--target", str(folder / "site")]
    wheel = next((folder / "dist").glob("*.whl"))
    subprocess.run([sys.executable, *install, str(wheel)], check=True, capture_output=True, timeout=300)
    return folder / "site"


def start(program: str, *arguments: str, processes: int, folder: Path, site: Path) -> list[float]:
    """The losses that a program prints, a copy outside the checkout started by torchrun."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import megalaunch; print(megalaunch.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, cwd=folder, env=environ, check=True).stdout.strip()
    assert found == str(site / "megalaunch/__init__.py")
    shutil.copy(ROOT / "docs" / "examples" / program, folder)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", program]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    losses = [float(loss) for loss in LOSS.findall(done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.slow
def test_the_training_loop_starts_under_torchrun_and_saves(tmp_path: Path, installed: Path) -> None:
    start("training_loop.py", *SMALL, "parallel=tp2", "train.steps=3", processes=2, folder=tmp_path, site=installed)
    assert json.loads((tmp_path / "checkpoints" / "step-3" / "position.json").read_text())["step"] == 3


@pytest.mark.slow
def test_the_own_block_starts_under_torchrun(tmp_path: Path, installed: Path) -> None:
    start("own_block.py", *SMALL, "parallel=tp2pp2", processes=4, folder=tmp_path, site=installed)


@pytest.mark.slow
def test_own_data_starts_under_torchrun(tmp_path: Path, installed: Path) -> None:
    pytest.importorskip("datasets", reason="the program reads a Hugging Face data set")
    texts = [f"the {number} of {number % 7} and the rest of the words" for number in range(400)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    start(
        "own_data.py",
        "corpus.jsonl",
        "tokenizer.json",
        *SMALL,
        "parallel=tp2",
        processes=2,
        folder=tmp_path,
        site=installed,
    )
