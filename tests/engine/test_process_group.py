"""Joining: a device that one worker lacks is known to all of them before any backend waits for it."""

import json
import os
from dataclasses import replace
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import small_spec

from megalaunch.engine import process_group, train_rank
from megalaunch.engine.platform import load_plugins
from megalaunch.engine.platform.platform import Platform
from megalaunch.engine.process_group import broadcast_first_error, local_device
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.overrides import Override, OverrideError
from megalaunch.platform.platforms import PLATFORMS
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import with_values

NO_DEVICE = RankError(ExitCode.CONFIGURATION, "worker 1 of this machine has no device: torch finds 1")


@pytest.mark.parametrize("problems", [(None, None, None), (None, NO_DEVICE, None), (NO_DEVICE, None, None)])
def test_every_rank_hears_of_a_problem(problems):
    store, heard = dist.HashStore(), {}

    def be(rank: int) -> None:
        heard[rank] = broadcast_first_error(store, rank, 3, problems[rank])

    ranks = [Thread(target=be, args=(rank,)) for rank in (2, 1, 0)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(10)
    assert heard == dict.fromkeys(range(3), NO_DEVICE if any(problems) else None)


@pytest.mark.parametrize(
    ("chip", "devices", "said"),
    [
        ("cpu", 0, None),
        ("h100", 0, "finds no cuda device; the run was made for"),
        ("h100", 1, "worker 1 of this machine has no device: torch finds 1"),
        ("made_up", 0, "torch_musa cannot be used: No module named 'torch_musa'; the run was made for made_up"),
    ],
)
def test_a_device_that_is_not_there(monkeypatch, chip, devices, said):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
    made_up = replace(CHIPS["h100"], name="made_up", device="musa")
    monkeypatch.setattr(process_group, "CHIPS", {**CHIPS, "made_up": made_up})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    spec = small_spec()
    device, problem = local_device(replace(spec, platform=replace(spec.platform, chip=chip)))
    assert device == torch.device("cpu")
    assert (problem is None) if said is None else (said in problem.reason)


def test_a_broken_override_ends_the_run_before_it_starts(monkeypatch):
    def broken(device: str) -> None:
        raise OverrideError(f"vendor.norm:rms_norm cannot be imported on {device}", "repair it")

    monkeypatch.setattr(process_group, "load_overrides", broken)
    _, problem = local_device(small_spec())
    assert problem == RankError(ExitCode.CONFIGURATION, "vendor.norm:rms_norm cannot be imported on cpu; repair it")


def test_a_platform_that_names_what_its_device_lacks_ends_the_run_before_it_starts(monkeypatch, capsys):
    class WarpPlatform(Platform):
        in_device_module = frozenset({"max_memory_allocated"})

    monkeypatch.setattr(process_group, "get_platform", lambda device: WarpPlatform(PLATFORMS["cpu"]))
    monkeypatch.setattr(load_plugins, "get_platform", lambda device: WarpPlatform(PLATFORMS["cpu"]))
    _, problem = local_device(small_spec())
    assert problem.exit_code == ExitCode.CONFIGURATION
    assert problem.reason.startswith("torch has no max_memory_allocated, which ")
    assert problem.reason.endswith("in_device_module; add it there, or override max_memory_allocated in that class")
    load_plugins.main("cpu")  # what the doctor runs
    assert json.loads(capsys.readouterr().out)["problem"].startswith("torch has no max_memory_allocated, which ")


def test_a_chip_whose_package_a_node_lacks_ends_the_run_before_it_starts():
    spec = small_spec()
    device, problem = local_device(replace(spec, platform=replace(spec.platform, chip="warp9")))
    assert device == torch.device("cpu")
    assert problem.reason.endswith("lacks the package that adds the chip warp9")


def test_ranks_with_different_overrides_end_together(monkeypatch):
    def body() -> str:
        rows = {"kernels.rms_norm.rms_norm": Override("kernels.rms_norm.rms_norm", "vendor.norm:rms_norm", "cpu")}
        monkeypatch.setattr(train_rank, "active_overrides", lambda device: rows if dist.get_rank() == 1 else {})
        with pytest.raises(RunEnd) as end:
            train_rank.record_overrides("cpu", None)
        return f"{int(end.value.exit_code)} {end.value.reason}"

    reasons = run_ranks(2, body)
    assert (
        reasons
        == [
            "2 overrides differ: {} on rank 0 and {'kernels.rms_norm.rms_norm': 'vendor.norm:rms_norm'} on rank 1; "
            "install the same packages on every node"
        ]
        * 2
    )


def test_transformer_engine_that_is_not_there_ends_the_run_before_it_starts():
    library = {"precision.compute_dtype": "fp8", "precision.fp8.implementation": "transformer_engine"}
    _, problem = local_device(with_values(small_spec(), library))
    assert problem is not None
    assert problem.exit_code == ExitCode.CONFIGURATION
    assert "=transformer_engine needs Transformer Engine, which " in problem.reason
    assert problem.reason.endswith("lacks: pip install 'megalaunch[te]'")
    _, problem = local_device(with_values(small_spec(), {**library, "precision.compute_dtype": "fp32"}))
    assert problem is None
