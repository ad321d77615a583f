"""`megalaunch checkpoint`: what a run has saved, what is in it, and which byte is not as it was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from local_shards import write_local_shard
from tiny_run import make_run, tiny_spec
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import write_spec


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Checkpoints of the steps 10, 20 and 30; the run keeps the newest, and those of every 20th step."""
    made = make_run(tmp_path / "tiny", steps=(10, 20, 30))
    rules = {"checkpoint.interval": 10, "checkpoint.keep_last": 1, "checkpoint.keep_every": 20}
    write_spec(with_values(tiny_spec(), rules), made.spec)
    return made


def call(*arguments: object):
    return CliRunner().invoke(app, ["checkpoint", *(str(argument) for argument in arguments)])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_list_has_the_checkpoints_on_this_machine(run: RunDirectory, tmp_path: Path):
    """This machine has the shards of node 0 and, in memory, the copy of node 1's; one on disk has lost a file."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    values = {"checkpoint.memory.path": str(memory), "checkpoint.local.path": str(disk), "cluster.devices_per_node": 1}
    write_spec(with_values(tiny_spec(), values), run.spec)
    for rank in (0, 1):
        write_local_shard(memory, run, rank, 34)
    (write_local_shard(disk, run, 0, 32) / "shard.safetensors").unlink()
    lines = call("list", run.root).stdout.splitlines()
    assert lines[5].endswith(" on this machine")
    assert [line.split()[:3] for line in lines[7:]] == [
        ["34", "0", "memory"],
        ["34", "1", "memory"],
        ["32", "0", "disk"],
    ]
    assert [line.rpartition("B  ")[2] for line in lines[7:9]] == ["complete", "complete"]
    assert "shard.safetensors: is missing" in lines[9]
    found = json.loads(call("list", run.root, "--json").stdout)["local"]
    assert [(row["step"], row["node"], row["tier"], row["complete"]) for row in found] == [
        (34, 0, "memory", True), (34, 1, "memory", True), (32, 0, "disk", False),
    ]  # fmt: skip


def test_the_list_of_a_run(run: RunDirectory):
    lines = call("list", run.root).stdout.splitlines()
    assert lines[0].startswith(f"{run.checkpoints}: 3 checkpoints, ")
    assert [line.split()[0] for line in lines[2:]] == ["10", "20", "30"]
    assert lines[2].endswith("complete  until the next save")
    assert lines[3].endswith("complete  every 20 steps")
    assert lines[4].endswith("complete  newest")
    shard = run.checkpoint(20) / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    cut_off = run.checkpoints / ".unfinished-step_00000040-00ff"
    cut_off.mkdir()
    (cut_off / "shard_00000.safetensors").write_bytes(bytes(1500))
    lines = call("list", run.root).stdout.splitlines()
    size = shard.stat().st_size
    assert f"shard_00000.safetensors: has {size} bytes instead of {size + 1}  every 20 steps" in lines[3]
    assert lines[5] == f"  {cut_off.name}, 1.5 kB: an interrupted save, removed when the run starts again"
    found = json.loads(call("list", run.root, "--json").stdout)
    assert [(row["step"], row["complete"], row["retained"]) for row in found["checkpoints"]] == [
        (10, True, None), (20, False, "every 20 steps"), (30, True, "newest"),
    ]  # fmt: skip
    assert found["unfinished"] == {cut_off.name: 1500}


def test_what_a_checkpoint_holds(run: RunDirectory):
    shown = call("inspect", run.root)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == call("inspect", run.checkpoint(30)).stdout
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"{run.checkpoint(30)}: complete, saved 20")
    assert lines[1] == "  step     30, 0 tokens seen"
    rows = [line.split() for line in lines if line.startswith("  model.")]
    assert ["model.layers.*.attention.k_proj.weight", "F32", "[16,", "32]", "4.1", "kB", "x", "2"] in rows
    assert "  optimizer.exp_avg: a tensor for each of the model's, of its shape" in lines
    every = call("inspect", run.root, "--all").stdout
    for name in ("model.layers.1.attention.k_proj.weight", "optimizer.exp_avg.layers.0.mlp.up_proj.weight"):
        assert name in every
    found = json.loads(call("inspect", run.checkpoint(10), "--json").stdout)
    assert (found["step"], found["problems"]) == (10, [])
    tensor = found["tensors"]["model.layers.1.attention.k_proj.weight"]
    part = {"offsets": [0, 0], "shape": [16, 32], "file": "shard_00000.safetensors"}
    assert tensor == {"dtype": "F32", "shape": [16, 32], "bytes": 2048, "parts": [part]}
    values = sum(total["values"] for total in found["totals"].values())
    assert found["totals"]["model"]["values"] * 2 == values
    assert sum(entry["bytes"] for entry in found["files"].values()) == found["bytes"]


def test_the_layout_is_told(run: RunDirectory):
    layout = {
        "parallel.dp": 2,
        "parallel.tp": 2,
        "cluster.nodes": 1,
        "cluster.devices_per_node": 4,
        "batch.micro_batch_size": 1,
    }
    path = run.checkpoint(30) / "spec.yaml"
    assert "  layout   unknown (not in its spec.yaml)" in call("inspect", run.checkpoint(30)).stdout
    write_spec(with_values(tiny_spec(), layout), path)
    shown = call("inspect", run.checkpoint(30)).stdout
    assert (
        "  layout   4 ranks: dp 2 x tp 2, data sharding optim; loads under any other layout too" in shown.splitlines()
    )
    assert "spec.yaml: has " in shown.splitlines()[0]  # a changed file is no complete checkpoint


def test_every_byte_is_verified_and_the_bad_file_named(run: RunDirectory):
    good = call("verify", run.root)
    assert good.exit_code == 0
    steps = [f"{run.checkpoint(step)}: valid. 5 files, " for step in (30, 20, 10)]
    assert all(line.startswith(step) for line, step in zip(good.stdout.splitlines(), steps, strict=True))
    flip(run.checkpoint(20) / "shard_00000.safetensors", -3)
    assert call("verify", run.checkpoint(30)).exit_code == 0
    bad = call("verify", run.root)
    assert bad.exit_code == 4
    assert len(bad.stdout.splitlines()) == 2
    assert bad.stderr.splitlines() == [
        f"{run.checkpoint(20)}: damaged",
        "  shard_00000.safetensors: is damaged (its sha256 is not the one in the manifest)",
    ]


def test_refusals(run: RunDirectory, tmp_path: Path):
    for command in ("list", "inspect", "verify"):
        refused = call(command, tmp_path / "nowhere")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "nowhere is not a directory: name a run directory" in refused.stderr
        assert call(command, run.logs.parent / "checkpoints" / "..").exit_code == 0  # any way of writing it
    (run.checkpoint(30) / "manifest.json").unlink()
    refused = call("inspect", run.checkpoint(30))
    assert refused.exit_code == 4
    assert "manifest.json: is missing, so the checkpoint is incomplete" in refused.stderr
    assert str(run.checkpoint(20)) in call("inspect", run.root).stdout
    for step in (10, 20, 30):
        (run.checkpoint(step) / "tensors.json").unlink()
    refused = call("inspect", run.root)
    assert (refused.exit_code, refused.stderr) == (4, f"error: {run.checkpoints} has no complete checkpoint\n")


def test_torch_is_not_needed(run: RunDirectory):
    code = (
        "import sys\nfrom megalaunch.cli.main import main\n"
        f"for given in (['list', {str(run.root)!r}], ['inspect', {str(run.root)!r}], ['verify', {str(run.root)!r}]):\n"
        "    sys.argv = ['megalaunch', 'checkpoint', *given]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "print(sorted({'torch', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
