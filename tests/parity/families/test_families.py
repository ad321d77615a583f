"""Each family held to transformers: logits, loss and every gradient, and what comes back after a step."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_variants import VARIANTS, VOCABULARY, load, make
from slow_cases import slow_but

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.checkpoint.export_huggingface import Export, StoredWeights, export_folder
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.import_checkpoint import make_spec
from megalaunch.engine.checkpoint.store import save_checkpoint
from megalaunch.engine.inference.fuse_projections import fuse_projections
from megalaunch.engine.inference.generate import GenerationConfig, generate_tokens
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.weight_maps.weights import get_family_weights
from megalaunch.importers.huggingface.registry import from_hf_config
from megalaunch.rundir.checkpoint.contents import WEIGHTS
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.mtp import MultiTokenSpec
from megalaunch.schema.spec_file import spec_to_text

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

TOKENS = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(3))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def unbalanced(model: ModelSpec) -> ModelSpec:
    """Without the loss that balances experts: transformers adds its own, over all layers together, only if asked."""
    return replace(model, moe=replace(model.moe, balance_loss="none", balance_loss_coeff=0.0))


def decoder_of(checkpoint: Path):
    weights = StoredWeights(checkpoint)
    decoder = build_decoder(unbalanced(weights.model))
    for name, tensor in tensors_of(decoder).items():
        tensor.data.copy_(weights.read(name))
    return decoder


def tensors_of(decoder) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that belong to the weights."""
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}


ONE_EACH = list({kind: name for name, (kind, _) in reversed(VARIANTS.items())}.values())
SOME_VARIANTS = slow_but(VARIANTS, *ONE_EACH[::3], slow=ONE_EACH, one_in=2)


@pytest.mark.parametrize("name", SOME_VARIANTS)
def test_there_and_back(name, tmp_path):
    theirs = make(name, tmp_path / "hf")
    report = import_huggingface(tmp_path / "hf", tmp_path / "ckpt")
    assert report["reader_of_the_folder"].startswith("transformers")
    ours = decoder_of(tmp_path / "ckpt")

    logits, expected = ours(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    loss, their_loss = loss_of(logits), loss_of(expected)
    torch.testing.assert_close(loss, their_loss, rtol=1e-4, atol=0)
    loss.backward()
    their_loss.backward()
    _hold_gradients(tmp_path / "hf", ours, theirs)

    export_huggingface(tmp_path / "ckpt", tmp_path / "same")
    _hold_bytes(tmp_path / "hf", tmp_path / "same")

    torch.optim.SGD(ours.parameters(), lr=0.05).step()
    _save(ours, tmp_path / "ckpt", tmp_path / "step")
    export_huggingface(tmp_path / "step", tmp_path / "out")
    again, info = load(tmp_path / "out")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        after = ours(TOKENS)
        torch.testing.assert_close(again.eval()(TOKENS).logits, after, rtol=1e-4, atol=1e-4)
    assert (after - logits).abs().max() > 1e-3, "the step changed nothing"


TRAINED = [(name, {}) for name in ONE_EACH] + [("gemma2", {"pad_token_id": 0})]


@pytest.mark.parametrize(("name", "origin"), slow_but(TRAINED, *TRAINED[::3]))
def test_an_export_trains_in_transformers_as_here(name, origin, tmp_path):
    """Every gradient of every token's row: none is taken for padding, neither by a default nor by the original file."""
    import transformers

    kind, values = VARIANTS[name]
    config = json.loads(getattr(transformers, kind)(**values).to_json_string(use_diff=False))
    model = replace(from_hf_config(config, name), mtp=MultiTokenSpec())  # transformers trains none of its layers
    ours = build_decoder(unbalanced(model))
    generator = torch.Generator().manual_seed(5)
    for parameter in ours.parameters():
        parameter.data.normal_(0.3 if parameter.ndim == 1 else 0.0, 0.3, generator=generator)
    (tmp_path / "spec.yaml").write_text(spec_to_text(make_spec(model)))
    given = {"vocab_size": VOCABULARY} | ({"config": {"model_type": config["model_type"], **origin}} if origin else {})
    (tmp_path / "origin.json").write_text(json.dumps(given))
    _save(ours, tmp_path, tmp_path / "trained")
    export_folder(StoredWeights(tmp_path / "trained"), Export(tmp_path / "out"), lambda *_: {}, lambda *_: None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pad_token_id"] is None
    assert origin or (written["bos_token_id"], written["eos_token_id"]) == (None, None), "no tokenizer says otherwise"
    theirs = load(tmp_path / "out")[0].train()
    every_row = torch.arange(VOCABULARY).unsqueeze(0)
    for logits in (ours(every_row), theirs(every_row).logits):
        F.cross_entropy(logits[0, :-1], every_row[0, 1:]).backward()
    _hold_gradients(tmp_path / "out", ours, theirs)


@pytest.mark.parametrize("name", SOME_VARIANTS)
def test_greedy_text(name, tmp_path):
    """64 tokens of transformers' `generate`, past every window; two prompts at once, projections fused and not."""
    theirs = make(name, tmp_path / "hf", **MORE_ROOM[name.startswith("gpt2")])
    weights = HuggingFaceWeights(HuggingFaceFolder(tmp_path / "hf"))
    ours = build_decoder(weights.model)
    for key, tensor in tensors_of(ours).items():
        tensor.data.copy_(weights.read(key))
    prompts = [TOKENS[0, :6].tolist(), TOKENS[1, :9].tolist()]
    expected = [_their_text(theirs, prompt) for prompt in prompts]
    for model in (ours.eval(), fuse_projections(deepcopy(ours))):
        drawn = generate_tokens(model, prompts, GenerationConfig(64, Sampling(temperature=0)))
        assert torch.stack([step.tokens_B for step in drawn], dim=1).tolist() == expected


MORE_ROOM = ({"max_position_embeddings": 96}, {"n_positions": 96})  # for 64 tokens and what is before them


def _their_text(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    return written[0, len(prompt) :].tolist()


def _hold_gradients(folder: Path, ours, theirs) -> None:
    """Their gradients under our names, each to 1e-4 of its largest value."""
    renamed = {"lm_head.weight": "embed_out.weight"} if theirs.config.model_type == "gpt_neox" else {}
    gradients = {renamed.get(key, key): p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    mine = {key: p.grad for key, p in ours.named_parameters()}
    # Without rotary positions a key's bias adds the same to all scores of a query, which a softmax does not see.
    zero_by_definition = theirs.config.model_type == "gpt2"
    steepest = max(gradient.abs().max() for gradient in mine.values())
    compared = set()
    model = HuggingFaceWeights(HuggingFaceFolder(folder)).model
    for pair in get_family_weights(model).mappings(model, gradients):
        if not set(pair.ours) <= mine.keys():  # a buffer
            continue
        for key, expected in zip(pair.ours, pair.to_ours([gradients[their] for their in pair.theirs]), strict=True):
            if zero_by_definition and key.endswith("k_proj.bias"):
                assert max(mine[key].abs().max(), expected.abs().max()) <= 1e-6 * steepest, key
            else:
                assert (mine[key] - expected).abs().max() <= 1e-4 * expected.abs().max(), key
            compared.add(key)
    assert compared == set(mine)


def _hold_bytes(folder: Path, other: Path) -> None:
    first, second = HuggingFaceFolder(folder), HuggingFaceFolder(other)
    assert first.tensors.keys() == second.tensors.keys()
    for key in first.tensors:
        assert torch.equal(first.read(key).view(torch.uint8), second.read(key).view(torch.uint8)), key


def _save(decoder, imported: Path, target: Path) -> None:
    """A checkpoint as a run would write it after its first step."""
    tensors = {WEIGHTS + key: tensor.detach() for key, tensor in tensors_of(decoder).items()}
    origin = json.loads((imported / "origin.json").read_text())
    save_checkpoint(target, tensors, {"origin": origin}, {"spec.yaml": imported / "spec.yaml"})
