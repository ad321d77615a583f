"""A run of the tiny recipe by the whole loop of training, with the attention of a package: its losses and its log."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_packages import forget_packages, stand_in_for_attention_packages
from forked_ranks import run_ranks
from looped_run import events, metrics, prepared_directory
from made_specs import resolved
from token_files import small_tokenizer, write_tokens

from megalaunch.engine import run_rank, train_rank
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec, with_values

VOCABULARY = 300


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    yield
    forget_packages()


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tokens")
    tokenizer = small_tokenizer(folder / "tokenizer.json", VOCABULARY)
    documents = [random.integers(0, VOCABULARY, size).tolist() for size in random.integers(5, 90, 60)]
    tokens = write_tokens(folder / "train", documents)
    overrides = (f"data.train_prefix={tokens}", "data.num_samples=40", "train.steps=5", "train.sample_prompt=null")
    layout = ("platform=cpu", "precision=fp32", "parallel=tp2", "parallel.sequence_parallel=true")
    packed = (
        f"tokenizer.path={tokenizer}",
        "data.reset_attention_mask=true",
        "data.reset_position_ids=true",
        f"model.vocab_size={VOCABULARY}",
    )
    return resolved("recipe=tiny", *overrides, *layout, *packed)[0]


def _losses(spec: RunSpec, root) -> list[float]:
    def body() -> None:
        directory, rank = prepared_directory(spec, root), dist.get_rank()
        run_rank.init_process_group, run_rank.destroy_process_group = (
            (lambda spec: (torch.device("cpu"), None)),
            dist.barrier,
        )  # the ranks have met already
        progress = ProgressWriter(directory.progress(rank), rank, 0)
        run_rank.run_rank(spec, directory, rank, progress, StopSignal(), train_rank.train, Fence(directory.attempts))

    run_ranks(2, body)
    outcome = read_outcome(RunDirectory(root).outcome)
    assert outcome is not None
    assert outcome.exit_code == 0, outcome.reason
    return [row["loss"] for row in metrics(root) if "loss" in row]


@pytest.fixture(scope="module")
def expected(spec, tmp_path_factory) -> list[float]:
    return _losses(spec, tmp_path_factory.mktemp("auto"))


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        pytest.param(
            "flash_attn",
            "FlashAttention 2 (flash_attn 2.8.3), package flash-attn: chosen by model.attention_backend",
            marks=(pytest.mark.slow, pytest.mark.release),
        ),
        (
            "te",
            "Transformer Engine 2.9.0, Transformer Engine's DotProductAttention: chosen by model.attention_backend",
        ),
    ],
)
def test_the_tiny_recipe_trains_by_a_package_and_says_which(backend, kernel, spec, expected, tmp_path):
    found = _losses(with_values(spec, {"model.attention_backend": backend}), tmp_path)
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-5)
    assert [(event["backend"], event["kernel"]) for event in events(tmp_path, "attention")] == [(backend, kernel)]
