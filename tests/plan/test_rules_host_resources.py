"""Room on the machine itself: what the rules of host memory and free disk count, and what they offer."""

import shlex
from dataclasses import replace

from made_specs import H100_NODE, LAPTOP, resolved

from megalaunch.plan.check import check
from megalaunch.plan.memory.checkpoint_sizes import held_bytes, host_checkpoint_bytes
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.rules import local_checkpoint
from megalaunch.schema import with_values

BIG = ("recipe=tiny", "data.corpus=x", "parallel=dp1", "model=llama3_8b", "tokenizer.vocab_size=128256")
OFTEN = ("train.steps=100", "checkpoint.interval=10", "checkpoint.keep_every=20", "checkpoint.keep_last=3")


def found(rule, *overrides, machine, purpose="validate"):
    spec, composition = resolved(*overrides, machine=machine)
    return spec, [f for f in check(spec, composition.origins, purpose, machine) if f.rule == rule]


def with_disk(machine, free):
    return replace(machine, free_disk=lambda path: free)


def test_checkpoints_that_are_there_at_once_are_counted():
    spec, (finding,) = found("checkpoint.free_disk", *BIG, *OFTEN, machine=with_disk(LAPTOP, 5 * 97 * 10**9))
    size = count_parameters(spec.model).total * 12  # fp32 weights and two moments
    assert finding.numbers == {"checkpoint_bytes": size, "checkpoints": 5 + 3 + 1, "free_bytes": 5 * 97 * 10**9}
    assert finding.severity == "warning"
    assert "a checkpoint is 96.4 GB" in finding.message
    assert "9 at a time" in finding.message
    assert "checkpoint.keep_last=3 checkpoint.keep_every=0" not in finding.fixes  # it is 3 already
    assert "checkpoint.keep_every=0" in finding.fixes
    assert found("checkpoint.free_disk", *BIG, *OFTEN, machine=with_disk(LAPTOP, 9 * size))[1] == []


def test_every_offered_way_leaves_room():
    machine = with_disk(LAPTOP, 3 * 97 * 10**9)
    (finding,) = found("checkpoint.free_disk", *BIG, *OFTEN, machine=machine)[1]
    assert finding.fixes
    for fix in finding.fixes:
        assert found("checkpoint.free_disk", *BIG, *OFTEN, *shlex.split(fix), machine=machine)[1] == [], fix


def test_a_disk_without_room_for_one_checkpoint_stops_a_launch():
    machine = with_disk(LAPTOP, 90 * 10**9)
    for purpose, severity in (("validate", "warning"), ("train", "error")):
        (finding,) = found("checkpoint.free_disk", *BIG, machine=machine, purpose=purpose)[1]
        assert (finding.severity, finding.fixes) == (severity, ())
        assert "run.directory=PATH" in finding.message


def test_what_the_runs_own_checkpoints_hold_is_room_for_newer_ones(tmp_path):
    held = tmp_path / "checkpoints" / "step_00000010"
    held.mkdir(parents=True)
    with (held / "shard").open("wb") as file:
        file.truncate(97 * 10**9)  # a hole: no disk is taken
    overrides = (*BIG, f"run.directory={tmp_path}", "checkpoint.interval=0")
    assert found("checkpoint.free_disk", *overrides, machine=with_disk(LAPTOP, 10**9))[1] == []
    assert found("checkpoint.free_disk", *overrides, machine=with_disk(LAPTOP, 10**6))[1] == []
    overrides = (*BIG, f"run.directory={tmp_path}/other", "checkpoint.interval=0")
    assert len(found("checkpoint.free_disk", *overrides, machine=with_disk(LAPTOP, 10**9))[1]) == 1


def test_a_run_for_other_devices_is_not_checked_against_this_machine():
    on_h100 = ("recipe=llama3_8b", "data.corpus=x")
    assert found("checkpoint.free_disk", *on_h100, machine=with_disk(LAPTOP, 1))[1] == []
    assert len(found("checkpoint.free_disk", *on_h100, machine=with_disk(H100_NODE, 1))[1]) == 1
    spec, composition = resolved(*BIG)
    assert not {f.rule for f in check(spec, composition.origins)} & {"checkpoint.free_disk", "memory.host"}
    assert found("checkpoint.free_disk", *BIG, machine=with_disk(LAPTOP, None))[1] == []


def test_workers_share_the_hosts_memory():
    overrides = ("recipe=tiny", "data.corpus=x", "model.hidden_size=2048", "model.ffn_hidden_size=8192", "parallel=dp2")
    (finding,) = found("memory.host", *overrides, machine=replace(LAPTOP, memory_bytes=1))[1]
    need = finding.numbers["bytes"]
    assert finding.numbers["workers"] == 2
    assert found("memory.host", *overrides, machine=replace(LAPTOP, memory_bytes=need))[1] == []
    just_too_small = replace(LAPTOP, memory_bytes=need - 10**6)
    (finding,) = found("memory.host", *overrides, machine=just_too_small)[1]
    assert finding.severity == "warning"
    assert finding.fixes
    for fix in finding.fixes:
        assert found("memory.host", *overrides, *shlex.split(fix), machine=just_too_small)[1] == [], fix
    assert found("memory.host", *overrides, machine=replace(LAPTOP, memory_bytes=0))[1] == []


def test_checkpoints_in_memory_take_host_memory():
    """Those retained, the one being written and the host copy from which it is written, each with its copy."""
    workers = ("recipe=tiny", "data.corpus=x", "parallel=dp2", "checkpoint.memory.interval=2", "checkpoint.interval=0")
    spec, (finding,) = found("memory.host", *workers, machine=replace(LAPTOP, memory_bytes=1))
    size = count_parameters(spec.model).total * 12
    without = found("memory.host", *workers[:3], machine=replace(LAPTOP, memory_bytes=1))[1][0]
    assert finding.numbers["bytes"] - without.numbers["bytes"] == 3 * size
    a_bit_less = replace(LAPTOP, memory_bytes=finding.numbers["bytes"] - 1)
    assert "checkpoint.memory.interval=0" in found("memory.host", *workers, machine=a_bit_less)[1][0].fixes
    nodes = {"cluster.nodes": 2, "cluster.devices_per_node": 1}
    assert host_checkpoint_bytes(with_values(spec, nodes)) == (2 * 2 + 1) * (size // 2)
    drained = {"checkpoint.local.interval": 4, "checkpoint.local.path": "/disk"}
    assert host_checkpoint_bytes(with_values(spec, nodes | drained)) == (2 * 3 + 1) * (size // 2)


def test_only_what_surely_does_not_fit_stops_a_launch():
    one = ("recipe=tiny", "data.corpus=x", "model.hidden_size=2048", "model.ffn_hidden_size=8192", "parallel=dp1")
    for room, severity in ((0.5e9, "error"), (10e9, None)):
        machine = replace(LAPTOP, memory_bytes=int(room))
        findings = found("memory.host", *one, machine=machine, purpose="train")[1]
        assert [finding.severity for finding in findings] == ([severity] if severity else [])


def test_only_the_runs_own_checkpoints_on_a_node_count_as_free(tmp_path):
    """Another run's folder may begin with the name of this one."""
    for folder, size in (("run-0123456789ab", 3), ("run-2-0123456789ab", 5), ("run-0123456789ab.txt", 7)):
        shard = tmp_path / folder / "rank_00000/step_00000002"
        shard.mkdir(parents=True)
        (shard / "shard.safetensors").write_bytes(bytes(size))
    assert held_bytes(tmp_path, f"run-{local_checkpoint._DIGEST}") == 3
