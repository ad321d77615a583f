"""A run that stopped and went on is the run that never stopped: metrics, weights and moments, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import RanksFailed
from looped_run import Rank, events, metrics, run_loop, ten_steps
from oracle import SEQUENCE
from slow_cases import slow_but

from megalaunch.engine.checkpoint import dcp_storage
from megalaunch.engine.checkpoint.store import read_tensors, verify_checkpoint
from megalaunch.rundir.jsonl import append_line, read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    return ten_steps(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def whole(spec, tmp_path_factory) -> Path:
    """The run of ten steps that nothing stops."""
    root = tmp_path_factory.mktemp("whole")
    assert run(spec, root) == "finished all 10 steps"
    return root


@pytest.fixture(scope="module")
def half(spec, tmp_path_factory) -> Path:
    """The same run, stopped after its fifth step."""
    root = tmp_path_factory.mktemp("half")
    assert "after step 5 of 10 as asked" in run(with_values(spec, {"train.exit_at_step": 5}), root)
    return root


def run(spec: RunSpec, root: Path, spoil: Callable[[Rank], None] = lambda rank: None) -> str:
    return run_loop(spec, root, spoil).reason


def assert_same_run(one: Path, other: Path, step: int = 10) -> None:
    assert metrics(one) == metrics(other)
    first, second = (read_tensors(RunDirectory(root).checkpoint(step)) for root in (one, other))
    assert first.keys() == second.keys()
    assert {name.split(".")[0] for name in first} == {"model", "optimizer"}
    assert all(torch.equal(first[name], second[name]) for name in first)


# In fp32 with "optim" the tests below compare a resumed run with the whole one.
STRATEGIES = [("fp32", "optim"), ("bf16", "optim_grads_params"), ("fp32", "no_shard"), ("bf16", "optim_grads")]


@pytest.mark.parametrize(("precision", "strategy"), slow_but(STRATEGIES, ("bf16", "optim_grads_params"), every=()))
def test_stop_and_resume_is_exact(spec, tmp_path, precision, strategy):
    layout = with_values(spec, {"precision.compute_dtype": precision, "parallel.data_sharding": strategy})
    if precision == "bf16":
        layout = with_values(layout, {"model.hidden_dropout": 0.2, "model.attention_dropout": 0.1})
        layout = with_values(layout, {"precision.exp_avg_dtype": "bf16", "precision.grad_dtype": "bf16"})
    if strategy == "optim_grads_params":
        layout = with_values(layout, {"precision.main_params_dtype": "bf16"})
    assert run(layout, tmp_path / "whole") == "finished all 10 steps"
    assert "after step 4 of 10 as asked" in run(with_values(layout, {"train.exit_at_step": 4}), tmp_path / "parts")
    run(layout, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert [line["step"] for line in metrics(tmp_path / "whole") if "validation_loss" in line] == [3, 6, 9, 10]


@pytest.mark.slow
def test_a_run_goes_on_exactly_with_other_states_in_host_memory(spec, whole, tmp_path):
    """Saved with all optimizer states in host memory, resumed with half of them there."""
    for fraction, last in ((1.0, 4), (0.5, None)):
        values = {"optimizer.optimizer_offload_fraction": fraction, "train.exit_at_step": last}
        run(with_values(spec, values), tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.slow
@pytest.mark.release  # the last test, and test_random_resharding.py of other layouts
def test_resume_with_a_padded_vocabulary_is_exact(spec, tmp_path):
    """No checkpoint holds the rows that pad 61 tokens over two ranks: they are not what memory happens to hold."""
    tensor = with_values(spec, {"parallel.dp": 1, "parallel.tp": 2})
    assert run(tensor, tmp_path / "whole") == "finished all 10 steps"
    run(with_values(tensor, {"train.exit_at_step": 4}), tmp_path / "parts")
    assert run(tensor, tmp_path / "parts") == "finished all 10 steps"
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_saves_and_the_run_goes_on_exactly(spec, whole, tmp_path):
    def spoil(rank: Rank) -> None:
        def interrupt(index: int) -> None:
            if index // 8 == 5:
                rank.stop.signal = signal.SIGTERM

        if rank.rank == 1:
            rank.during("training", interrupt)

    # The batch of step 6 is read ahead while step 5 runs, so the signal is seen by the end of 5 or of 6.
    reason = run(spec, tmp_path / "parts", spoil)
    assert reason.startswith("stopped by SIGTERM after step")
    run(spec, tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")


def test_lines_past_the_loaded_step_are_cut_and_a_missed_validation_is_made_up(spec, whole, tmp_path):
    run(with_values(spec, {"train.exit_at_step": 3}), tmp_path / "parts")
    path = RunDirectory(tmp_path / "parts").metrics
    lines = path.read_text().splitlines()
    assert "validation_loss" in lines.pop()
    path.write_text("\n".join(lines) + "\n")
    append_line(path, {"step": 4, "loss": 9.0})
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a killed writer
    run(spec, tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")
    cuts = [line for line in read_lines(RunDirectory(tmp_path / "parts").events) if line["event"] == "metrics_cut"]
    assert [(cut["after_step"], cut["lines"]) for cut in cuts] == [(3, 2)]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(spec, tmp_path):
    saving = with_values(spec, {"checkpoint.interval": 4})
    run(saving, tmp_path / "whole")
    run(with_values(saving, {"train.exit_at_step": 8}), tmp_path / "parts")
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
    (cut,) = (event for event in events if event["event"] == "metrics_cut")
    assert (cut["after_step"], cut["last_step"]) == (4, 8)
    assert verify_checkpoint(newest) == []  # saved again


@pytest.mark.parametrize("ranks", slow_but([1, 4], 1, every=()))
def test_another_layout_goes_on_with_the_same_samples(spec, whole, half, tmp_path, ranks):
    shutil.copytree(half, tmp_path / "parts")
    layout = {"parallel.dp": ranks, "cluster.devices_per_node": ranks, "parallel.data_sharding": "optim_grads_params"}
    run(with_values(spec, layout), tmp_path / "parts")
    before, parts = metrics(whole), metrics(tmp_path / "parts")
    assert [line["step"] for line in before] == [line["step"] for line in parts]
    for key in ("loss", "validation_loss", "grad_norm"):
        values = [[line[key] for line in lines if key in line] for lines in (before, parts)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_one_and_two_ranks_see_the_same_losses(spec, whole, tmp_path):
    alone = with_values(spec, {"parallel.dp": 1, "cluster.devices_per_node": 1})
    run(alone, tmp_path / "one")
    losses = [[line["loss"] for line in metrics(root) if "loss" in line] for root in (tmp_path / "one", whole)]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5, rtol=0)


def test_a_longer_run_keeps_what_it_had(spec, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    before = metrics(tmp_path / "run")
    longer = with_values(spec, {"train.steps": 14})
    assert run(longer, tmp_path / "run") == "finished all 14 steps"
    after = metrics(tmp_path / "run")
    assert after[: len(before)] == before
    assert [line["learning_rate"] for line in after if line["step"] > 10 and "loss" in line] == [0.0] * 4
    document = json.loads((RunDirectory(tmp_path / "run").checkpoint(14) / "position.json").read_text())
    assert document == {"step": 14, "tokens": 14 * 8 * SEQUENCE}


def test_a_checkpoint_of_another_model_is_refused_by_name(spec, tmp_path):
    run(with_values(spec, {"train.exit_at_step": 2}), tmp_path / "run")
    other = replace(spec, model=replace(spec.model, num_layers=2, ffn_hidden_size=48))
    with pytest.raises(RanksFailed, match=r"layers\.2\.mlp\.up_proj\.weight") as failure:
        run(other, tmp_path / "run")
    assert "layers.0.mlp.up_proj.weight has the shape [40, 24] in the checkpoint, [48, 24] in the run" in str(
        failure.value
    )


def damage(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(content)


def tree(root: Path) -> dict[str, bytes]:
    paths = [root / "metrics.jsonl", *(root / "checkpoints").rglob("*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def test_a_run_whose_checkpoints_are_all_damaged_ends_and_changes_nothing(spec, tmp_path):
    saving = with_values(spec, {"checkpoint.interval": 2, "train.exit_at_step": 4})
    run(saving, tmp_path)
    for step in (2, 4):
        damage(RunDirectory(tmp_path).checkpoint(step))
    (RunDirectory(tmp_path).checkpoints / ".unfinished-step_00000006-00ff").mkdir()
    before = tree(tmp_path)
    with pytest.raises(
        RanksFailed, match=r"no checkpoint in .* is valid \(step_00000004: shard_0000\d\.safe.*, and 1 older\)"
    ) as failure:
        run(spec, tmp_path)
    assert "CheckpointError" in str(failure.value)
    assert tree(tmp_path) == before
    assert (RunDirectory(tmp_path).checkpoints / ".unfinished-step_00000006-00ff").is_dir()
    assert [event["path"][-2:] for event in events(tmp_path, "checkpoint_refused")] == ["04", "02"]
    shutil.rmtree(RunDirectory(tmp_path).checkpoints)
    with pytest.raises(RanksFailed, match="is empty, but the run has saved a checkpoint of step 4"):
        run(spec, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before[str(tmp_path / "metrics.jsonl")]


def test_a_copy_under_another_steps_name_is_passed_over(spec, tmp_path):
    saving = with_values(spec, {"checkpoint.keep_last": 1})
    run(with_values(saving, {"train.exit_at_step": 4}), tmp_path)
    directory = RunDirectory(tmp_path)
    shutil.copytree(directory.checkpoint(4), directory.checkpoint(999))
    problem = "position.json: is for step 4, but the directory is named step 999"
    assert verify_checkpoint(directory.checkpoint(999)) == [problem]
    run(with_values(saving, {"train.exit_at_step": 6}), tmp_path)
    assert [event["step"] for event in events(tmp_path, "resumed")] == [4]
    assert verify_checkpoint(directory.checkpoint(6)) == []  # not removed as an older one


def test_lines_that_a_power_cut_took_are_told(spec, half, tmp_path):
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    path = RunDirectory(tmp_path).metrics
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] not in (2, 4)))
    run(with_values(spec, {"train.exit_at_step": 6}), tmp_path)
    (gap,) = events(tmp_path, "metrics_gap")
    assert {key: gap[key] for key in ("until_step", "missing", "first", "last")} == {
        "until_step": 5,
        "missing": 2,
        "first": 2,
        "last": 4,
    }


def test_metrics_are_on_disk_before_a_checkpoint_vouches_for_them(spec, tmp_path):
    def spoil(rank: Rank) -> None:
        real, publish = os.fsync, dcp_storage.publish_directory

        def fsync(descriptor: int) -> None:
            with (tmp_path / "order").open("a") as file:
                file.write(Path(f"/proc/self/fd/{descriptor}").readlink().name + "\n")
            real(descriptor)

        def published(unfinished: Path, directory: Path) -> None:
            with (tmp_path / "order").open("a") as file:
                file.write(f"{directory.name} {len(metrics(tmp_path))}\n")
            publish(unfinished, directory)

        if rank.rank == 0:
            os.fsync, dcp_storage.publish_directory = fsync, published

    saving = {"checkpoint.interval": 1, "train.exit_at_step": 2, "train.validation_interval": 0}
    run(with_values(spec, saving), tmp_path, spoil)
    order = (tmp_path / "order").read_text().splitlines()
    assert [line for line in order if line.startswith(("metrics", "step"))] == [
        "metrics.jsonl",
        "step_00000001 1",
        "metrics.jsonl",
        "step_00000002 2",
    ]


@pytest.mark.parametrize("tp", slow_but([1, 2], slow=[1], every=()))
def test_rows_beyond_the_vocabulary_that_a_run_began_with_are_padding(spec, tmp_path, tp):
    """Whatever stands in them, after a resume too: a run with 64 rows of weights that know 61 tokens."""

    def begin(root: Path, value: float | None, known: int) -> list[dict]:
        wide = with_values(spec, {"model.vocab_size": 64, "parallel.dp": 1, "parallel.tp": tp})
        wide = with_values(wide, {"cluster.devices_per_node": tp, "train.exit_at_step": 2})
        origin = RunDirectory(root).origin
        origin.mkdir(parents=True)
        (origin / "origin.json").write_text(json.dumps({"vocab_size": known, "config": None}))

        def spoil(rank: Rank) -> None:
            head = dict(rank.trainee.model.named_parameters())["head.weight"]
            if value is not None and rank.rank == tp - 1:
                with torch.no_grad():
                    (head.to_local() if hasattr(head, "to_local") else head)[-3:] = value

        run(wide, root, spoil)
        run(with_values(wide, {"train.exit_at_step": 4}), root)
        return metrics(root)

    plain, spoiled = begin(tmp_path / "plain", None, 61), begin(tmp_path / "spoiled", 3.0, 61)
    assert [line.get("loss") for line in spoiled] == [line.get("loss") for line in plain]
    assert begin(tmp_path / "counted", 3.0, 64)[0]["loss"] > plain[0]["loss"]


def test_training_is_the_phase_again_after_a_save(spec, tmp_path):
    """The time line, spans and trackers count what follows a phase to it, up to the next one."""
    run(with_values(spec, {"checkpoint.interval": 4, "checkpoint.async_save": False}), tmp_path / "run")
    phases = [(event["phase"], event["step"]) for event in events(tmp_path / "run", "phase")]
    validated = {step: [("validating", step), ("training", step)] for step in (3, 6, 9, 10)}
    saved = {step: [("saving", step), ("training", step)] for step in (4, 8)}
    expected = [("training", 0), *validated[3], *saved[4], *validated[6], *saved[8], *validated[9], *validated[10]]
    assert phases[-len(expected) - 2 :] == [*expected, ("saving", 10), ("ending", 10)]
