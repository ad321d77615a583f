"""Checkpoints that megatron-core wrote, imported: its logits, whatever it was saved by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megalaunch[parity])")
from megatron_checkpoint import ROWS, TOKENS, save

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.streaming_forward import streamed_logits


def convert(source: Path, output: Path, *arguments: str):
    called = ["convert", "import-megatron", str(source), "--output", str(output), "--allow-pickle", *arguments]
    return CliRunner().invoke(app, called)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "stacked"),
    [
        ("llama", 1, False),
        ("llama", 2, True),
        ("gpt", 1, True),
        ("gpt", 2, False),
        ("mixtral", 1, True),
        ("mixtral", 2, False),
        ("deepseek", 1, False),
    ],
)
def test_logits_are_megatrons(name, ranks, stacked, tmp_path):
    theirs = save(name, tmp_path / "iter_0000007", ranks, stacked)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    done = convert(tmp_path, tmp_path / "ckpt", "--vocab-size", str(ROWS - 3))
    assert done.exit_code == 0, done.output
    assert "iteration 7" in done.output
    weights = StoredWeights(tmp_path / "ckpt")
    assert weights.model.vocab_size == ROWS - 3
    ours = streamed_logits(weights.model, weights.read, TOKENS.clamp(max=ROWS - 4))
    same = (TOKENS < ROWS - 3).long().cumprod(1).bool()  # up to the first token that is only Megatron's filling
    assert same.sum() > 8
    torch.testing.assert_close(ours[same], torch.as_tensor(theirs)[..., : ROWS - 3][same], rtol=1e-4, atol=1e-5)
