"""A folder begins a run under any layout: every parameter, and the loss and gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_variants import VARIANTS, VOCABULARY, load, make, make_multimodal
from forked_ranks import run_ranks
from looped_run import metrics, run_loop, ten_steps
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.data.samples.build_datasets import build_train_dataset
from megalaunch.engine.checkpoint.convert import export_huggingface
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.load_pretrained import load_pretrained
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "tp2 pp2": {"tp": 2, "pp": 2, "schedule": "1f1b", "sequence_parallel": True},
}


def _loaded(spec: RunSpec, folder: Path) -> dict[str, torch.Tensor]:
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    load_pretrained(folder, spec.model, model)
    return {
        name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in (*model.named_parameters(), *model.named_buffers())
    }


def _all_loaded(specs: dict[str, tuple[RunSpec, Path]]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: _loaded(spec, folder) for name, (spec, folder) in specs.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Every variant with four layers, and a vocabulary that is odd; and the text decoder of one with images."""
    place = tmp_path_factory.mktemp("variants")
    for number, name in enumerate(VARIANTS):
        changes: dict[str, Any] = {"n_layer": 4} if name.startswith("gpt2") else {"num_hidden_layers": 4}
        if name == "gemma3 scaled":
            changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
        if name == "gemma3 full":
            changes["layer_types"] = ["full_attention"] * 4
        make(name, place / str(number), **changes)
    make_multimodal(place / "multimodal", num_hidden_layers=4)
    return {name: place / str(number) for number, name in enumerate(VARIANTS)} | {"multimodal": place / "multimodal"}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, every=["tp2", "pp2"]))
def test_every_parameter_arrives(layout, folders):
    """Of every variant; the ranks are forked once."""
    chosen = small_spec(**{f"parallel__{key}": value for key, value in {"dp": 1, **LAYOUTS[layout]}.items()})
    weights = {name: HuggingFaceWeights(HuggingFaceFolder(folder)) for name, folder in folders.items()}
    specs = {  # 7 rows to fill up
        name: (replace(chosen, model=replace(weights[name].model, vocab_size=VOCABULARY + 7)), folder)
        for name, folder in folders.items()
    }
    parts = run_ranks(chosen.cluster.devices_per_node, _all_loaded, specs)
    for name, theirs in weights.items():
        found = {key: torch.as_tensor(value) for part in parts for key, value in part[name].items()}
        assert found.keys() == theirs.shapes.keys(), name
        for key, arrived in found.items():
            if key in ("embedding.weight", "head.weight"):
                assert not arrived[VOCABULARY:].any(), (name, key)
                arrived = arrived[:VOCABULARY]
            assert torch.equal(arrived, theirs.read(key)), (name, key)


@pytest.mark.parametrize("rows", slow_but([64, 61], 61), ids=["filled_up", "padded"])
def test_a_run_begins_with_the_weights_and_its_checkpoint_is_exported(tmp_path, rows):
    """The worker's own way: loop, save, export; the loss is transformers', and the true vocabulary comes back.

    So do the companions. The vocabulary is filled up by who asks for it, or padded since tp does not divide it.
    """
    make("llama 3.2", tmp_path / "hf", vocab_size=61)
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_k": 3}')
    model = replace(HuggingFaceWeights(HuggingFaceFolder(tmp_path / "hf")).model, vocab_size=rows)
    spec = small_spec(parallel__dp=1, parallel__tp=2, checkpoint__load_pretrained=str(tmp_path / "hf"))
    spec = replace(spec, model=model, train=replace(spec.train, steps=2))
    spec = replace(spec, data=replace(ten_steps(tmp_path).data, validation_prefix=None))
    run_loop(spec, tmp_path / "run")
    tokens = torch.stack([torch.from_numpy(build_train_dataset(spec)[index].tokens) for index in range(8)])
    with torch.no_grad():
        logits = load(tmp_path / "hf")[0](tokens[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(theirs.item(), rel=1e-6), "padded rows do not count"
    export_huggingface(tmp_path / "run", tmp_path / "out")
    again, info = load(tmp_path / "out")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.vocab_size == 61
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert f"is read as by transformers {transformers.__version__}" in events
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k": 3}'
    before, after = (HuggingFaceFolder(tmp_path / name).read("model.norm.weight") for name in ("hf", "out"))
    assert 0 < (before - after).abs().max() < 0.01, "two small steps from where it began"


def test_a_run_does_not_begin_with_a_misread_model(tmp_path, monkeypatch):
    """What we read wrongly ends the run, and what nobody can verify is said."""
    from megalaunch.engine.checkpoint import verify_config
    from megalaunch.engine.checkpoint.errors import CheckpointError
    from megalaunch.importers.huggingface import llama

    make("llama 1", tmp_path / "hf")
    monkeypatch.setattr(verify_config, "find_spec", lambda name: None)
    assert "is not verified: transformers is not installed" in str(verify_config.describe_verification(tmp_path / "hf"))
    monkeypatch.undo()
    read = llama.read_rope
    monkeypatch.setattr(llama, "read_rope", lambda file: {**read(file), "theta": 500.0})
    with pytest.raises(CheckpointError, match="the run is not started"):
        verify_config.describe_verification(tmp_path / "hf")
