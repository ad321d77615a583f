"""Checkpoints that megatron-core wrote, imported: its logits and gradients, whatever it was saved by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megalaunch[parity])")
from megatron_checkpoint import ROWS, TOKENS, save, save_with_gradients

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder

INPUTS, LABELS = TOKENS[:, :-1], TOKENS[:, 1:]


def imported(source: Path, *arguments: str) -> StoredWeights:
    """Convert a folder of Megatron and open what was written."""
    output = source.parent / f"{source.name}_ckpt"
    called = ["convert", "import-megatron", str(source), "--output", str(output), "--allow-pickle", *arguments]
    done = CliRunner().invoke(app, called)
    assert done.exit_code == 0, done.output
    assert "iteration 7" in done.output
    return StoredWeights(output)


def load(weights: StoredWeights) -> Decoder:
    decoder = build_decoder(weights.model)
    state = {name: weights.read(name) for name in weights.shapes}
    decoder.load_state_dict(state | ({"head.weight": state["embedding.weight"]} if "head.weight" not in state else {}))
    return decoder


def all_logits(decoder: Decoder, tokens_BS: torch.Tensor, depths: int) -> list[torch.Tensor]:
    """Logits by the decoder, and by each depth where it has a token to embed, [B, S - depth, V]."""
    length = tokens_BS.shape[1]
    further = [F.pad(tokens_BS[:, depth:], (0, depth)) for depth in range(1, depths + 1)]
    logits = decoder(tokens_BS, mtp_tokens_BDS=torch.stack(further, dim=1) if depths else None)
    return [part[:, : length - depth] for depth, part in enumerate(logits.chunk(1 + depths))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "stacked", "singleton"),
    [
        ("llama", 1, False, False),
        ("llama", 2, True, False),
        ("gated attention", 2, True, False),
        ("gpt", 1, True, False),
        ("gpt", 2, False, False),
        ("mixtral", 1, True, False),
        ("mixtral", 2, False, True),
        ("deepseek", 1, False, False),
        ("dense_latent", 1, True, False),
        ("deepseek_v3", 1, False, False),
        ("deepseek_v3", 2, False, True),
    ],
)
def test_logits_are_megatrons(name, ranks, stacked, singleton, tmp_path):
    theirs = save(name, tmp_path / "run" / "iter_0000007", ranks, stacked, singleton)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    weights = imported(tmp_path / "run", "--vocab-size", str(ROWS - 3))
    assert weights.model.vocab_size == ROWS - 3
    decoder = load(weights)
    known = INPUTS < ROWS - 3
    with torch.no_grad():
        ours = all_logits(decoder, INPUTS.clamp(max=ROWS - 4), weights.model.mtp.num_layers)
    assert len(ours) == len(theirs)
    for depth, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        same = known.long().cumprod(1).bool()[:, depth:]  # up to the first token that is only Megatron's filling
        assert same.sum() > 8
        expected = torch.as_tensor(its)[:, : mine.shape[1], : ROWS - 3]
        torch.testing.assert_close(
            mine[same], expected[same], rtol=1e-4, atol=1e-5, msg=lambda text, d=depth: f"{d}: {text}"
        )


@pytest.mark.slow
@pytest.mark.release  # test_megatron_model.py and test_megatron_experts.py compare the parts
@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_loss_and_every_gradient_are_megatrons(name, tmp_path):
    """Latent attention, experts, shared experts and two depths of multi-token prediction."""
    their_loss = save_with_gradients(name, tmp_path / "weights", tmp_path / "gradients")
    weights, gradients = imported(tmp_path / "weights"), imported(tmp_path / "gradients")
    decoder, mtp = load(weights), weights.model.mtp
    means = [
        F.cross_entropy(logits.flatten(0, 1), LABELS[:, depth:].flatten())
        for depth, logits in enumerate(all_logits(decoder, INPUTS, mtp.num_layers))
    ]
    assert len(means) == 3
    (means[0] + mtp.loss_coeff * sum(means[1:]) / mtp.num_layers).backward()
    torch.testing.assert_close(means[0].item(), their_loss, rtol=1e-6, atol=0)
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        theirs = gradients.read(parameter_name)
        assert theirs.abs().max() > 0, parameter_name
        torch.testing.assert_close(
            parameter.grad,
            theirs,
            rtol=0,
            atol=1e-5 * theirs.abs().max().item(),
            msg=lambda t, n=parameter_name: f"{n}: {t}",
        )
