"""The wheel alone: installed without torch, from another folder, the launcher wing is whole."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow


def call(*arguments: object, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGALAUNCH_RECIPES")}
    texts = [str(argument) for argument in arguments]
    return subprocess.run(texts, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel built from the checkout, and the one built from the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", ROOT]
    direct = call(*build, "--wheel", "--outdir", folder / "direct", cwd=folder)
    assert direct.returncode == 0, direct.stdout + direct.stderr
    through_sdist = call(*build, "--outdir", folder / "sdist", cwd=folder)
    assert through_sdist.returncode == 0, through_sdist.stdout + through_sdist.stderr
    return [next((folder / name).glob("*.whl")) for name in ("direct", "sdist")]


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """The command of a fresh environment with the wheel and what a plain install brings, and a folder to work in."""
    folder = tmp_path_factory.mktemp("elsewhere")
    made = call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "venv/bin/python"
    done = call(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheels[0], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert call(python, "-c", "import torch", cwd=folder).returncode != 0
    return folder / "venv/bin/megalaunch", folder


def test_both_wheels_carry_everything(wheels):
    contents = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert contents[0] == contents[1]
    names = set(contents[0])
    for folder, package in (
        ("conf", "megalaunch/conf"),
        ("recipes", "megalaunch/recipes"),
        ("kernels", "megalaunch/kernels"),
        ("docs/reference", "megalaunch/reference"),
    ):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files
        assert {f"{package}/{path.relative_to(ROOT / folder)}" for path in files} <= names
    assert not [name for name in names if not name.startswith(("megalaunch/", "megalaunch-"))]
    assert not [name for name in names if "__pycache__" in name]


def test_help_version_and_recipes(installed):
    megalaunch, folder = installed
    shown = call(megalaunch, "--help", cwd=folder)
    assert shown.returncode == 0
    assert "validate-config" in shown.stdout
    assert call(megalaunch, "--version", cwd=folder).stdout == "megalaunch 0.1.0\n"
    listed = call(megalaunch, "recipes", "list", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    assert "quickstart" in listed.stdout
    assert "llama3_8b" in listed.stdout
    assert call(megalaunch, "recipes", "show", "quickstart", cwd=folder).returncode == 0


def test_validate_config(installed):
    megalaunch, folder = installed
    valid = call(megalaunch, "validate-config", "recipe=quickstart", cwd=folder)
    assert valid.returncode == 0, valid.stdout + valid.stderr
    short_of_devices = call(
        megalaunch, "validate-config", "recipe=llama3_8b", "parallel=tp4pp4", "cluster.nodes=1", cwd=folder
    )
    assert short_of_devices.returncode == 2
    assert "cluster.nodes=2" in short_of_devices.stdout + short_of_devices.stderr


def test_preprocess(installed):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    megalaunch, folder = installed
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["some text"], trainers.BpeTrainer(vocab_size=260, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.jsonl").write_text('{"text": "one document"}\n{"text": "and another"}\n')
    done = call(
        megalaunch, "preprocess", "text.jsonl", "--output-prefix", "out/small", "--tokenizer", "tokenizer.json",
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(path.suffix for path in folder.glob("out/small*") if path.suffix in (".bin", ".idx"))
    assert written == [".bin", ".idx"]


@pytest.mark.parametrize(
    "arguments", [["train", "recipe=quickstart"], ["generate", "runs/quickstart", "--prompt", "x"]]
)
def test_what_needs_torch_names_the_extra(installed, arguments):
    megalaunch, folder = installed
    (folder / "runs/quickstart").mkdir(parents=True, exist_ok=True)
    refused = call(megalaunch, *arguments, cwd=folder)
    assert refused.returncode == 2
    assert "megalaunch[train]" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_doctor_names_what_is_missing(installed):
    megalaunch, folder = installed
    done = call(megalaunch, "doctor", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed (for: train, generate)" in done.stdout
    assert "fix: pip install 'megalaunch[train]'" in done.stdout
