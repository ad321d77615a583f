"""Everything that a package may override is checked on its own: what passes on passes, and what is lost is caught."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import wraps
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine import api
from megalaunch.engine.operator_check import check_operators
from megalaunch.engine.param_layout import local_param
from megalaunch.engine.platform.cpu import CpuPlatform
from megalaunch.engine.platform.device_check import check_device
from megalaunch.engine.platform.registry import get_platform
from megalaunch.kernels import overridable
from megalaunch.kernels.overridable import reference
from megalaunch.kernels.rms_norm import rms_norm_reference
from megalaunch.platform import overrides
from megalaunch.platform.overrides import OVERRIDABLE, Override
from megalaunch.platform.platforms import PLATFORMS


@pytest.fixture
def replace_all(monkeypatch):
    """Override these targets on the CPU: classes by subclasses, others by functions that `change` what they give."""

    def replace(targets, change=lambda result: result) -> None:
        module = ModuleType("vendor_of_all")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows = []
        for target in targets:
            original, name = reference(target), target.replace(".", "_")
            if isinstance(original, type):
                setattr(module, name, type(name, (original,), {}))
            else:
                setattr(module, name, _calling(original, change))
            rows.append(Override(target, f"{module.__name__}:{name}", "cpu"))
        monkeypatch.setattr(overrides, "_registered", rows)
        monkeypatch.setattr(overridable, "_loaded", {})

    return replace


def _calling(original, change):
    @wraps(original)
    def call(*args, **kwargs):
        return change(original(*args, **kwargs))

    call.__signature__ = inspect.signature(original)
    return call


def test_an_override_of_anything_that_computes_the_same_is_right(replace_all):
    replace_all(OVERRIDABLE)
    found = list(check_operators(get_platform("cpu")))
    assert [(one.operator, one.problem) for one in found if not one.passed] == []
    replaced = {one.operator for one in found if one.implementation.startswith("vendor_of_all:")}
    assert {operator.partition(" (")[0] for operator in replaced} == set(OVERRIDABLE)
    assert {"engine.model.layers.Norm (zero-centered)", "engine.model.mlp.MLP.activation (gelu)"} <= replaced


def test_a_method_that_loses_a_gradient_is_wrong(replace_all):
    methods = [target for target, kind in OVERRIDABLE.items() if kind == "method"]
    replace_all(methods, lambda result: result.detach() + 0 * result)
    wrong = {one.operator for one in check_operators(get_platform("cpu")) if not one.passed}
    assert {operator.partition(" (")[0] for operator in wrong} == set(methods)


def test_a_norm_that_forgets_a_setting_is_wrong(replace_all, monkeypatch):
    replace_all(["engine.model.layers.Norm.normalize"])
    name = "engine_model_layers_Norm_normalize"
    monkeypatch.setattr(sys.modules["vendor_of_all"], name, plain_rms_norm)
    wrong = {one.operator for one in check_operators(get_platform("cpu")) if not one.passed}
    assert wrong == {f"engine.model.layers.Norm.normalize ({variant})" for variant in ("LayerNorm", "zero-centered")}


def plain_rms_norm(self, x):
    return rms_norm_reference(x, local_param(self.weight), self.config.epsilon)


class BrokenPlatform(CpuPlatform):
    """A device with errors of every kind: a function that its module lacks, wrong figures, no such process group."""

    has_streams = True

    def make_stream(self, device):
        raise AttributeError("module 'torch_warp' has no attribute 'Stream'")

    def max_memory_allocated(self, device):
        return 8

    def autocast_dtypes(self):
        return (torch.float32,)


def test_what_a_device_cannot_do_is_named(monkeypatch):
    broken = BrokenPlatform(replace(PLATFORMS["cpu"], process_group_backend="wccl"))
    found = {one.ability: one.problem for one in check_device(broken)}
    assert found["copies"] is None
    assert found["streams"] == "AttributeError: module 'torch_warp' has no attribute 'Stream'"
    assert found["memory"] == "max_memory_allocated is 8 bytes while a tensor holds 1048576"
    assert found["autocast dtypes"] == "torch.float32 has not 16 bits"
    assert "wccl" in found["process group wccl"]

    monkeypatch.setattr(api, "check_platform", lambda name: ("warp", list(check_device(broken)), []))
    done = CliRunner().invoke(app, ["platform", "check", "warp"])
    assert done.exit_code == 2
    assert done.stderr == (
        "wrong: warp fails in streams, memory, autocast dtypes, process group wccl\n"
        "fix:  repair the package that adds warp\n"
    )


def test_a_working_device_has_no_problem():
    assert [one for one in check_device(get_platform("cpu")) if one.problem] == []
