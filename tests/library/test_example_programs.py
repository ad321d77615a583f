"""The programs of docs/examples, started as their pages say, with megalaunch installed from its wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from paths import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LOSS = re.compile(r"step +\d+  loss (\d\.\d{4})")
SMALL = ("recipe=tiny", "train.steps=3", "batch.sequence_length=32", "batch.global_batch_size=4", "model.num_layers=2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and all else from this one; the checkout is not on its path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True, timeout=300)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
    # The .pth files there, one of which names the checkout, are not read in a folder that a .pth file adds.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheel = next((folder / "dist").glob("*.whl"))
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=300)
    where = "import sys, megalaunch; print(megalaunch.__file__, *sys.path, sep='\\n')"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, cwd=folder, check=True, timeout=60)
    module, *path = found.stdout.splitlines()
    assert module == str(site / "megalaunch/__init__.py")
    assert (site / "megalaunch/py.typed").exists()
    assert str(ROOT) not in path
    return python


def start(program: str, *arguments: str, processes: int, folder: Path, python: Path) -> list[float]:
    """The losses that a program prints, a copy outside the checkout started by torchrun."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONPATH", None)
    shutil.copy(ROOT / "docs" / "examples" / program, folder)
    command = [str(python), "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
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
    start("training_loop.py", *SMALL, "parallel=tp2", "train.steps=3", processes=2, folder=tmp_path, python=installed)
    assert json.loads((tmp_path / "checkpoints" / "step-3" / "position.json").read_text())["step"] == 3


@pytest.mark.slow
def test_the_own_block_starts_under_torchrun(tmp_path: Path, installed: Path) -> None:
    start("own_block.py", *SMALL, "parallel=pp2", processes=2, folder=tmp_path, python=installed)


@pytest.mark.slow
@pytest.mark.release  # test_library.py reads the data set of the page
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
        python=installed,
    )
