"""Overrides of another package, installed beside megalaunch: used, listed, and refused where they are broken."""

from __future__ import annotations

import pytest
import torch
from installed_package import install_package

from megalaunch.cli.doctor import build_report
from megalaunch.kernels import overridable
from megalaunch.kernels.overridable import load_overrides, operator_name, reference
from megalaunch.kernels.rms_norm import rms_norm
from megalaunch.platform.detect import detect_machine
from megalaunch.platform.overrides import OVERRIDABLE, OverrideError, active_overrides, installed_overrides

PLUGIN = """
from megalaunch.platform.overrides import Override

NORM = "kernels.rms_norm.rms_norm"
TWICE = (Override(NORM, "vendor.norm:twice", "cpu"),)
FIRST = (Override(NORM, "vendor.norm:first", "cpu", priority=1),)
ABSENT = (Override(NORM, "vendor.absent:twice", "cpu"),)
NARROW = (Override(NORM, "vendor.norm:narrow", "cpu"),)
UNKNOWN = (Override("kernels.rms_norm.norm", "vendor.norm:twice", "cpu"),)
NOWHERE = (Override(NORM, "vendor.norm:twice", "nowhere"),)
LIST = [1]
"""
NORM = """
from megalaunch.kernels.rms_norm import rms_norm_reference

def twice(x, weight, epsilon):
    return 2 * rms_norm_reference(x, weight, epsilon)

def first(x, weight, epsilon):
    return x

def narrow(x, weight):
    return x
"""
X, WEIGHT = torch.arange(6.0).view(2, 3) + 1, torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install vendor's package with these overrides, by entry point."""

    def add(**entries: str) -> None:
        install_package(tmp_path, {"vendor/plugin.py": PLUGIN, "vendor/norm.py": NORM}, "megalaunch.overrides", entries)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(overridable, "_loaded", {})
        installed_overrides.cache_clear()

    yield add
    installed_overrides.cache_clear()


def test_every_named_operator_can_be_overridden():
    assert [operator_name(reference(target)) for target in OVERRIDABLE] == list(OVERRIDABLE)


def test_a_package_replaces_an_operator_on_its_device_only(install):
    expected = rms_norm(X, WEIGHT, 1e-5)
    install(vendor="vendor.plugin:TWICE")
    assert torch.equal(rms_norm(X, WEIGHT, 1e-5), 2 * expected)
    assert rms_norm(X.to("meta"), WEIGHT.to("meta"), 1e-5).shape == X.shape
    assert active_overrides("cuda") == {}


def test_a_compiled_function_calls_the_override(install):
    expected = rms_norm(X, WEIGHT, 1e-5)
    install(vendor="vendor.plugin:TWICE")
    load_overrides("cpu")
    compiled = torch.compile(lambda x: rms_norm(x, WEIGHT, 1e-5), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(X), 2 * expected)


def test_the_highest_priority_is_used_and_listed(install):
    install(other="vendor.plugin:FIRST", vendor="vendor.plugin:TWICE")
    assert rms_norm(X, WEIGHT, 1e-5) is X
    rows = {row["operator"]: row["implementation"] for row in build_report(detect_machine(), [])["operators"]}
    assert rows["kernels.rms_norm.rms_norm, overridden"] == "vendor.norm:first"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "vendor.plugin:ABSENT",
            "vendor.absent:twice, which replaces kernels.rms_norm.rms_norm on cpu, cannot be impo",
        ),
        (
            "vendor.plugin:NARROW",
            "takes (x, weight), not (x, weight, epsilon); install its version for this megalaunch",
        ),
        (
            "vendor.plugin:UNKNOWN",
            "the overrides vendor of vendor replace kernels.rms_norm.norm; operators are kernels",
        ),
        ("vendor.plugin:NOWHERE", "the overrides vendor of vendor are for nowhere; platforms are cuda, musa"),
        ("vendor.plugin:LIST", "the overrides vendor of vendor are [1], not a tuple of Override"),
        ("vendor.none:LIST", "the overrides vendor of vendor cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_broken_override_is_an_error_and_never_the_original(install, entry, message):
    install(vendor=entry)
    with pytest.raises(OverrideError) as error:
        rms_norm(X, WEIGHT, 1e-5)
    assert message in str(error.value)


def test_two_of_one_priority_are_an_error_that_the_doctor_shows(install):
    install(other="vendor.plugin:TWICE", vendor="vendor.plugin:NARROW")
    (problem,) = build_report(detect_machine(), [])["problems"]
    assert "both replace kernels.rms_norm.rms_norm on cpu with priority 0; uninstall one" in problem["problem"]
