"""`megalaunch platform check txda`: a vendor's override on the built device is used, and a wrong one is caught."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from installed_package import install_package
from training import MEGALAUNCH
from txda_device import build_txda

PLUGIN = """
from megalaunch.platform.overrides import Override

RIGHT = (Override("kernels.rms_norm.rms_norm", "vendor.norm:right", "txda"),)
WRONG = (Override("kernels.rms_norm.rms_norm", "vendor.norm:wrong", "txda"),)
WRONG_BACKWARD = (Override("kernels.swiglu.swiglu", "vendor.norm:detached", "txda"),)
NONE = ()
"""
NORM = """
from megalaunch.kernels.rms_norm import rms_norm_reference

def right(x, weight, epsilon):
    return x * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt().to(x.dtype) * weight

def wrong(x, weight, epsilon):
    return right(x, weight, epsilon) * 1.001

def detached(gate, up, *, overwrite_up=False):
    return gate.sigmoid().detach() * gate * up
"""


def check(folder: Path, entry: str, platform: str = "txda") -> subprocess.CompletedProcess[str]:
    files = {"vendor/plugin.py": PLUGIN, "vendor/norm.py": NORM}
    install_package(folder, files, "megalaunch.overrides", {"vendor": f"vendor.plugin:{entry}"})
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{build_txda()}"}
    command = [*MEGALAUNCH, "platform", "check", platform]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("entry", ["NONE", "RIGHT"])
def test_right_operators_pass(tmp_path, entry):
    done = check(tmp_path, entry)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("operators on txda\n")
    assert done.stdout.endswith("all are right\n")
    assert ("vendor.norm:right" in done.stdout) == (entry == "RIGHT")


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("WRONG", "wrong: kernels.rms_norm.rms_norm by vendor.norm:wrong\n"),
        ("WRONG_BACKWARD", "wrong: kernels.swiglu.swiglu by vendor.norm:detached\n"),
    ],
)
def test_a_wrong_override_is_named(tmp_path, entry, named):
    done = check(tmp_path, entry)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("npu", "npu cannot be checked here: torch_npu cannot be used"),
        ("nowhere", "no platform has torch's device type"),
    ],
)
def test_a_platform_that_is_not_here_is_an_error(tmp_path, platform, message):
    done = check(tmp_path, "NONE", platform)
    assert done.returncode == 2
    assert message in done.stderr
