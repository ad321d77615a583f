"""`megalaunch platform check txda`: a vendor's override on the built device is used, and a wrong one is caught."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from installed_package import install_package
from txda_device import build_txda
from warm_process import COLD_MEGALAUNCH, MEGALAUNCH

PLUGIN = """
from megalaunch.platform.overrides import Override

RIGHT = (Override("kernels.rms_norm.rms_norm", "vendor.norm:right", "txda"),)
WRONG = (Override("kernels.rms_norm.rms_norm", "vendor.norm:wrong", "txda"),)
WRONG_BACKWARD = (Override("kernels.swiglu.swiglu", "vendor.norm:detached", "txda"),)
WRONG_CLASS = (
    Override("engine.model.mlp.MLP", "vendor.modules:WrongMLP", "txda"),
    Override("engine.model.layers.Norm.normalize", "vendor.modules:normalize", "txda"),
    Override("engine.model.attention.attention.Attention", "vendor.modules:OtherAttention", "txda"),
)
ON_ONE_THREAD = (Override("kernels.swiglu.swiglu", "vendor.norm:on_one_thread", "txda"),)
"""
NORM = """
import threading

import torch
from megalaunch.kernels.rms_norm import rms_norm_reference

def right(x, weight, epsilon):
    return x * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt().to(x.dtype) * weight

def wrong(x, weight, epsilon):
    return right(x, weight, epsilon) * 1.001

class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate.sigmoid() * gate * up

    @staticmethod
    def backward(ctx, dy):
        assert threading.current_thread() is threading.main_thread()  # no other may hold Python objects at the exit
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share

def on_one_thread(gate, up, *, overwrite_up=False):
    return Swiglu.apply(gate, up)

def detached(gate, up, *, overwrite_up=False):
    return gate.sigmoid().detach() * gate * up
"""
MODULES = """
from megalaunch.engine.model.attention.attention import Attention
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.kernels.overridable import reference

class WrongMLP(MLP):
    def project_down(self, activated):
        return super().project_down(activated.detach())

class OtherAttention(Attention):
    def __init__(self, hidden_size, config, norm, tp_region=NO_TP):
        super().__init__(hidden_size, config, norm, tp_region)
        del self.k_proj

def normalize(self, x):
    return reference("engine.model.layers.Norm.normalize")(self, x)
"""


def check(folder: Path, entry: str) -> subprocess.CompletedProcess[str]:
    files = {"vendor/plugin.py": PLUGIN, "vendor/norm.py": NORM, "vendor/modules.py": MODULES}
    install_package(folder, files, {"megalaunch.overrides": {"vendor": f"vendor.plugin:{entry}"}})
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{build_txda()}"}
    command = [*COLD_MEGALAUNCH, "platform", "check", "txda"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow  # of the processor tests/engine/test_operator_check.py proves it every time
@pytest.mark.parametrize("entry", ["RIGHT", pytest.param("ON_ONE_THREAD", marks=pytest.mark.release)])
def test_right_operators_pass(tmp_path, entry):
    done = check(tmp_path, entry)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("device txda\n")
    assert "process group tccl  ok\n\noperators on txda\n" in done.stdout
    assert done.stdout.endswith("all are right\n")
    assert f"vendor.norm:{entry.lower()}" in done.stdout


@pytest.mark.slow  # tests/engine/test_operator_check.py proves it, and all of the others, on the processor
@pytest.mark.parametrize(
    ("entry", "named"),
    [
        pytest.param(
            *("WRONG", "wrong: kernels.rms_norm.rms_norm by vendor.norm:wrong (vendor 1.0)\n"),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *("WRONG_BACKWARD", "wrong: kernels.swiglu.swiglu by vendor.norm:detached (vendor 1.0)\n"),
            marks=pytest.mark.release,
        ),
        (
            "WRONG_CLASS",
            "wrong: engine.model.attention.attention.Attention (output gate) by vendor.modules:OtherAttention "
            "(vendor 1.0), engine.model.attention.attention.Attention by vendor.modules:OtherAttention (vendor 1.0), "
            "engine.model.mlp.MLP (geglu) by vendor.modules:WrongMLP (vendor 1.0), "
            "engine.model.mlp.MLP (gelu) by vendor.modules:WrongMLP (vendor 1.0), "
            "engine.model.mlp.MLP by vendor.modules:WrongMLP (vendor 1.0)\n",
        ),
    ],
)
def test_a_wrong_override_is_named(tmp_path, entry, named):
    done = check(tmp_path, entry)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("npu", "npu cannot be checked here: torch_npu cannot be used"),
        pytest.param("nowhere", "no platform has torch's device type", marks=pytest.mark.release),
    ],
)
def test_a_platform_that_is_not_here_is_an_error(platform, message):
    command = [*MEGALAUNCH, "platform", "check", platform]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert message in done.stderr
