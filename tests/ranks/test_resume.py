"""A run that stopped and went on is the run that never stopped: metrics, weights and moments, bit for bit."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import RanksFailed, run_ranks
from oracle import VOCABULARY, small_spec
from token_files import write_tokens

from megalaunch.config.schema import RunSpec, with_values
from megalaunch.config.spec_file import write_spec
from megalaunch.engine.checkpoint.store import read_tensors, verify_checkpoint
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.process import StopRequest
from megalaunch.engine.train.assemble import assemble
from megalaunch.engine.train.loop import Loop
from megalaunch.engine.train.record import Record
from megalaunch.plan.topology import Topology
from megalaunch.rundir.lines import append_line, read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter

SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss")


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    documents = [random.integers(0, VOCABULARY, size).tolist() for size in random.integers(5, 90, 60)]
    train = write_tokens(folder / "train", documents)
    validation = write_tokens(folder / "validation", documents[:9])
    return small_spec(
        data__train_prefix=str(train),
        data__validation_prefix=str(validation),
        data__num_samples=80,
        train__steps=10,
        train__validation_interval=3,
        schedule__shape="cosine",
        schedule__decay_steps=10,
        schedule__warmup_steps=2,
        parallel__dp=2,
    )


def _live(spec: RunSpec, root: Path, stop_during: int | None = None) -> str:
    directory = RunDirectory(root)
    for folder in (directory.logs, directory.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    rank, stop = dist.get_rank(), StopRequest()
    if rank == 0:
        write_spec(spec, directory.spec)
    dist.barrier()
    trainee = assemble(spec, make_mesh(Topology.of(spec), torch.device("cpu"), rank))
    if stop_during is not None and rank == 1:
        read, training = type(trainee.training).__getitem__, trainee.training

        class Interrupting(type(training)):
            """Receives a signal while a sample of that step is read."""

            def __getitem__(self, index: int) -> np.ndarray:
                if index // spec.batch.global_batch_size == stop_during - 1:
                    stop.signal = signal.SIGTERM
                return read(self, index)

        training.__class__ = Interrupting
    loop = Loop(trainee, directory, Record(directory, rank, ProgressWriter(directory.progress(rank), rank, 0)), stop)
    loop.resume()
    return loop.run().reason


def run(spec: RunSpec, root: Path, stop_during: int | None = None) -> str:
    return run_ranks(spec.parallel.dp, _live, spec, root, stop_during)[0]


def metrics(root: Path) -> list[dict]:
    return [{key: line[key] for key in SAME if key in line} for line in read_lines(RunDirectory(root).metrics)]


def assert_same_run(one: Path, other: Path, step: int = 10) -> None:
    assert metrics(one) == metrics(other)
    first, second = (read_tensors(RunDirectory(root).checkpoint(step)) for root in (one, other))
    assert first.keys() == second.keys()
    assert {name.split(".")[0] for name in first} == {"model", "optimizer"}
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("precision", "strategy"),
    [
        ("fp32", "optim"),
        ("bf16", "optim_grads_params"),
        pytest.param("fp32", "no_shard", marks=pytest.mark.slow),
        pytest.param("bf16", "optim_grads", marks=pytest.mark.slow),
    ],
)
def test_stop_and_resume_is_exact(spec, tmp_path, precision, strategy):
    layout = with_values(spec, {"precision.compute": precision, "parallel.data_sharding": strategy})
    assert run(layout, tmp_path / "whole") == "finished all 10 steps"
    assert "after step 4 of 10 as asked" in run(with_values(layout, {"train.stop_at": 4}), tmp_path / "parts")
    run(layout, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert [line["step"] for line in metrics(tmp_path / "whole") if "validation_loss" in line] == [3, 6, 9, 10]


def test_a_signal_saves_and_the_run_goes_on_exactly(spec, tmp_path):
    assert run(spec, tmp_path / "whole") == "finished all 10 steps"
    # The batch of step 6 is read ahead while step 5 runs, so the signal is seen by the end of 5 or of 6.
    reason = run(spec, tmp_path / "parts", stop_during=6)
    assert reason.startswith("stopped by SIGTERM after step")
    run(spec, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_lines_past_the_loaded_step_are_cut_and_a_missed_validation_is_made_up(spec, tmp_path):
    run(spec, tmp_path / "whole")
    run(with_values(spec, {"train.stop_at": 3}), tmp_path / "parts")
    path = RunDirectory(tmp_path / "parts").metrics
    lines = path.read_text().splitlines()
    assert "validation_loss" in lines.pop()
    path.write_text("\n".join(lines) + "\n")
    append_line(path, {"step": 4, "loss": 9.0})
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a killed writer
    run(spec, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    cuts = [line for line in read_lines(RunDirectory(tmp_path / "parts").events) if line["event"] == "metrics_cut"]
    assert [(cut["after_step"], cut["lines"]) for cut in cuts] == [(3, 2)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(spec, tmp_path):
    saving = with_values(spec, {"checkpoint.interval": 4})
    run(saving, tmp_path / "whole")
    run(with_values(saving, {"train.stop_at": 8}), tmp_path / "parts")
    newest = RunDirectory(tmp_path / "parts").checkpoint(8)
    shard = next(newest.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-3] ^= 1
    shard.write_bytes(damaged)
    run(saving, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    events = list(read_lines(RunDirectory(tmp_path / "parts").events))
    refused = [event for event in events if event["event"] == "checkpoint_refused"]
    assert refused[0]["path"] == str(newest)
    assert shard.name in refused[0]["reason"]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [4]
    assert verify_checkpoint(newest) == []  # saved again


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_layout_goes_on_with_the_same_samples(spec, tmp_path, ranks):
    run(spec, tmp_path / "whole")
    run(with_values(spec, {"train.stop_at": 5}), tmp_path / "parts")
    layout = {"parallel.dp": ranks, "cluster.devices_per_node": ranks, "parallel.data_sharding": "optim_grads_params"}
    run(with_values(spec, layout), tmp_path / "parts")
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [line["step"] for line in whole] == [line["step"] for line in parts]
    for key in ("loss", "validation_loss", "grad_norm"):
        values = [[line[key] for line in lines if key in line] for lines in (whole, parts)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_one_and_two_ranks_see_the_same_losses(spec, tmp_path):
    alone = with_values(spec, {"parallel.dp": 1, "cluster.devices_per_node": 1})
    run(spec, tmp_path / "two")
    run(alone, tmp_path / "one")
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5, rtol=0)


def test_a_longer_run_keeps_what_it_had(spec, tmp_path):
    run(spec, tmp_path / "run")
    before = metrics(tmp_path / "run")
    longer = with_values(spec, {"train.steps": 14})
    assert run(longer, tmp_path / "run") == "finished all 14 steps"
    after = metrics(tmp_path / "run")
    assert after[: len(before)] == before
    assert [line["learning_rate"] for line in after if line["step"] > 10 and "loss" in line] == [0.0] * 4
    document = json.loads((RunDirectory(tmp_path / "run").checkpoint(14) / "position.json").read_text())
    assert document == {"step": 14, "tokens": 14 * 8 * 12}


def test_a_checkpoint_of_another_model_is_refused_by_name(spec, tmp_path):
    run(with_values(spec, {"train.stop_at": 2}), tmp_path / "run")
    other = replace(spec, model=replace(spec.model, num_layers=2, ffn_hidden_size=48))
    with pytest.raises(RanksFailed, match=r"layers\.2\.mlp\.up_proj\.weight") as failure:
        run(other, tmp_path / "run")
    assert "layers.0.mlp.up_proj.weight has the shape [40, 24] there, [48, 24] here" in str(failure.value)
