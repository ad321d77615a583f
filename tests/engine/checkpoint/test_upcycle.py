"""A dense checkpoint upcycled to experts: the dense model's logits, whatever the routers and the granularity."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import small_spec
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.convert import upcycle
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.import_checkpoint import make_spec
from megalaunch.engine.checkpoint.store import save_checkpoint
from megalaunch.engine.checkpoint.upcycle import Upcycling
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.rundir.checkpoint.contents import SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.spec_file import spec_to_text

MODEL = small_spec(model__num_layers=2, model__vocab_size=64).model
GPT = replace(MODEL, activation="gelu", mlp_bias=True)


def save_dense(model: ModelSpec, checkpoint: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with random weights, biases too."""
    decoder = build_decoder(model)
    init_weights(decoder, 3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tensors = {WEIGHTS + name: p.detach().to(dtype) for name, p in decoder.named_parameters()}
    spec, tokenizer = checkpoint.with_name("spec.yaml"), checkpoint.with_name("tokenizer.json")
    spec.write_text(spec_to_text(make_spec(model)))
    tokenizer.write_text("{}")
    save_checkpoint(checkpoint, tensors, {}, {SPEC_FILE: spec, TOKENIZER_FILE: tokenizer})
    return checkpoint


def loaded(checkpoint: Path) -> Decoder:
    """The decoder with a checkpoint's weights in fp32."""
    weights = StoredWeights(checkpoint)
    decoder = build_decoder(weights.model)
    decoder.load_state_dict({name: weights.read(name).float() for name in weights.shapes})
    return decoder


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return save_dense(MODEL, tmp_path_factory.mktemp("dense") / "step_00000001")


@pytest.mark.parametrize("asked", [Upcycling(4, 2), Upcycling(8, 4, granularity=2)], ids=["copies", "slices"])
@pytest.mark.parametrize("model", [MODEL, GPT], ids=["swiglu", "gelu with biases"])
def test_the_logits_are_the_dense_models(tmp_path, model, asked):
    source = save_dense(model, tmp_path / "dense")
    report = upcycle(source, asked, tmp_path / "experts")
    assert report["largest_difference"] < 1e-5
    tokens = torch.randint(0, 64, (2, 9))
    first, second = loaded(source), loaded(tmp_path / "experts")
    torch.testing.assert_close(second(tokens), first(tokens), rtol=1e-5, atol=1e-5)
    moe = second.config.moe
    assert (moe.num_experts, moe.top_k) == (asked.num_experts, asked.top_k)
    assert moe.expert.width == model.ffn_hidden_size // asked.granularity


def test_experts_are_copies_and_routers_are_seeded(dense, tmp_path):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        upcycle(dense, Upcycling(4, 2, seed=seed), tmp_path / str(number))
        found.append(StoredWeights(tmp_path / str(number)))
    up = StoredWeights(dense).read("layers.0.mlp.up_proj.weight")
    assert all(torch.equal(expert, up) for expert in found[0].read("layers.0.mlp.experts.up_proj.weight"))
    first, again, other = (weights.read("layers.1.mlp.router.weight") for weights in found)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert first.std().item() == pytest.approx(MODEL.init_std, rel=0.2)


def test_the_command_keeps_dtypes_and_tokenizer(tmp_path):
    source = save_dense(MODEL, tmp_path / "dense", torch.bfloat16)
    called = ["convert", "upcycle", str(source), "--experts", "4", "--output", str(tmp_path / "experts")]
    done = CliRunner().invoke(app, called)
    assert done.exit_code == 0, done.output
    assert "verified: logits of 2 x 24 random tokens, fp32: largest difference to the dense model" in done.output
    assert (tmp_path / "experts" / TOKENIZER_FILE).read_text() == "{}"
    weights = StoredWeights(tmp_path / "experts")
    assert {weights.dtype(name) for name in weights.shapes} == {torch.bfloat16}
    assert weights.model.family == "mixtral"


def test_what_is_impossible_is_listed(dense, tmp_path):
    refused = partial(upcycle, dense, checkpoint=tmp_path / "experts")
    with pytest.raises(
        ValueError, match=r"--experts 4 is not divisible by --granularity 3\n--top-k 2 is not .*\nmodel"
    ):
        refused(Upcycling(4, 2, granularity=3))
    with pytest.raises(ValueError, match=r"--top-k 5 is above --experts 4"):
        refused(Upcycling(4, 5))
    assert not (tmp_path / "experts").exists()
    upcycle(dense, Upcycling(4, 2), tmp_path / "experts")
    with pytest.raises(ValueError, match="has 4 experts: only a dense model can be upcycled"):
        upcycle(tmp_path / "experts", Upcycling(4, 2), tmp_path / "again")
