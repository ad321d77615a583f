"""Overrides of another package, installed beside megalaunch: used, listed, and refused where they are broken."""

from __future__ import annotations

import sys

import pytest
import torch
from installed_package import install_package
from made_specs import resolved

from megalaunch.cli.doctor import build_report
from megalaunch.engine.model.config import MLPConfig, NormConfig
from megalaunch.engine.model.layers import Norm, ShardedRMSNorm
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.engine.operator_cases import CASES
from megalaunch.engine.param_layout import COLUMN_PARALLEL
from megalaunch.kernels import overridable
from megalaunch.kernels.overridable import build_for, load_overrides, reference, target_name
from megalaunch.kernels.rms_norm import rms_norm
from megalaunch.plan.check import check
from megalaunch.plan.overrides import overrides_row
from megalaunch.platform import overrides
from megalaunch.platform.detect import detect_machine
from megalaunch.platform.overrides import OVERRIDABLE, OverrideError, active_overrides, installed_overrides

PLUGIN = """
from megalaunch.platform.overrides import Override, OverridePackage

NORM, CLASS = "kernels.rms_norm.rms_norm", "engine.model.layers.Norm"
TWICE = (Override(NORM, "vendor.norm:twice", "cpu"),)
FIRST = (Override(NORM, "vendor.norm:first", "cpu", priority=1),)
ABSENT = (Override(NORM, "vendor.absent:twice", "cpu"),)
NARROW = (Override(NORM, "vendor.norm:narrow", "cpu"),)
UNKNOWN = (Override("kernels.rms_norm.norm", "vendor.norm:twice", "cpu"),)
NOWHERE = (Override(NORM, "vendor.norm:twice", "nowhere"),)
LIST = [1]
CLASSES = (
    Override(CLASS, "vendor.modules:DoubledNorm", "cpu"),
    Override("engine.model.mlp.MLP.activation", "vendor.modules:no_activation", "cpu"),
)
STRANGER = (Override(CLASS, "vendor.modules:Stranger", "cpu"),)
OTHER_SIZE = (Override(CLASS, "vendor.modules:OtherNorm", "cpu"),)
MIRROR = (OverridePackage("vendor.mirror", "cpu"),)
NO_PACKAGE = (OverridePackage("vendor.nothing", "cpu"),)
EMPTY = (OverridePackage("vendor.empty", "cpu"),)
MISSPELT = (OverridePackage("vendor.misspelt", "cpu"),)
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
MODULES = """
from megalaunch.engine.model.layers import Norm

class DoubledNorm(Norm):
    def normalize(self, x):
        return 2 * super().normalize(x)

class OtherNorm(Norm):
    def __init__(self, width, config):
        super().__init__(width, config)

class Stranger:
    pass

def no_activation(self, *entered):
    return entered[-1]
"""
DECORATED = """
import torch
from megalaunch.kernels.rms_norm import rms_norm_reference
from megalaunch.platform.overrides import override

@override("kernels.rms_norm.rms_norm", platform="cpu", priority=3)
def thrice(x, weight, epsilon):
    return 3 * rms_norm_reference(x, weight, epsilon)
"""
VARIABLE = """
from megalaunch.platform.overrides import override
DEVICE = "cpu"

@override("kernels.rms_norm.rms_norm", platform=DEVICE)
def thrice(x, weight, epsilon):
    return x
"""
KEYWORDS = """
from megalaunch.platform.overrides import override
@override("kernels.rms_norm.rms_norm", vendor="cpu")
def thrice(x, weight, epsilon):
    return x
"""
FILES = {
    "vendor/plugin.py": PLUGIN,
    "vendor/norm.py": NORM,
    "vendor/modules.py": MODULES,
    "vendor/decorated.py": DECORATED,
    "vendor/variable.py": VARIABLE,
    "vendor/keywords.py": KEYWORDS,
    "vendor/mirror/kernels/rms_norm.py": "from vendor.norm import twice as rms_norm\n",
    "vendor/mirror/engine/model/layers.py": "from vendor.modules import DoubledNorm as Norm\n",
    "vendor/empty/kernels/rmsnorm.py": "",
    "vendor/misspelt/kernels/rms_norm.py": "from megalaunch.kernels.rms_norm import rms_norm\n",
}
X, WEIGHT = torch.arange(6.0).view(2, 3) + 1, torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install vendor's package with these overrides, by entry point."""

    def add(**entries: str) -> None:
        install_package(tmp_path, FILES, {"megalaunch.overrides": entries})
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.split(".")[0] == "vendor"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(overridable, "_loaded", {})
        monkeypatch.setattr(overrides, "_registered", [])
        installed_overrides.cache_clear()

    yield add
    monkeypatch.undo()
    installed_overrides.cache_clear()


def test_everything_named_can_be_overridden_and_is_checked():
    assert [target_name(reference(target)) for target in OVERRIDABLE] == list(OVERRIDABLE)
    assert {case.name for case in CASES} == set(OVERRIDABLE)


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


def test_a_package_replaces_a_class_and_a_method(install):
    install(vendor="vendor.plugin:CLASSES")
    config, device = NormConfig(1e-5), torch.device("cpu")
    plain = Norm(3, config)
    with build_for(device):
        norm, mlp = Norm(3, config), MLP(3, MLPConfig(width=4))
        sharded = ShardedRMSNorm(3, config, COLUMN_PARALLEL, NO_TP)
    assert (type(plain).__name__, type(norm).__name__, type(sharded)) == ("Norm", "DoubledNorm", ShardedRMSNorm)
    assert isinstance(norm, Norm)
    assert norm.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(norm(X), 2 * plain(X))
    assert torch.equal(mlp.activation(X, 5 * X), 5 * X)
    with build_for(torch.device("meta")):
        assert type(Norm(3, config)) is Norm


def test_a_mirroring_package_replaces_what_it_defines(install):
    install(vendor="vendor.plugin:MIRROR")
    rows = {target: str(row) for target, row in active_overrides("cpu").items()}
    assert rows == {
        "kernels.rms_norm.rms_norm": "vendor.mirror.kernels.rms_norm:rms_norm (vendor 1.0)",
        "engine.model.layers.Norm": "vendor.mirror.engine.model.layers:Norm (vendor 1.0)",
    }
    assert "vendor.mirror" not in sys.modules  # listed without an import
    expected = rms_norm(X.to("meta"), WEIGHT.to("meta"), 1e-5)
    assert torch.allclose(rms_norm(X, WEIGHT, 1e-5), 2 * torch.nn.functional.rms_norm(X, (3,), WEIGHT, 1e-5))
    assert expected.shape == X.shape


def test_a_decorated_function_is_listed_without_an_import_and_used(install):
    expected = rms_norm(X, WEIGHT, 1e-5)
    install(other="vendor.plugin:TWICE", vendor="vendor.decorated")
    assert str(active_overrides("cpu")["kernels.rms_norm.rms_norm"]) == "vendor.decorated:thrice (vendor 1.0)"
    assert "vendor.decorated" not in sys.modules
    assert torch.allclose(rms_norm(X, WEIGHT, 1e-5), 3 * expected)
    assert len(active_overrides("cpu")) == 1  # its import registered it again


def test_a_program_registers_an_override_of_its_own(install):
    expected = rms_norm(X, WEIGHT, 1e-5)
    install()

    assert torch.equal(rms_norm(X, WEIGHT, 1e-5), expected)
    overrides.override("kernels.rms_norm.rms_norm", platform="cpu")(negated)
    assert torch.equal(rms_norm(X, WEIGHT, 1e-5), -expected)
    with pytest.raises(OverrideError, match="is not at the top of its module; move it there"):
        overrides.override("kernels.rms_norm.rms_norm", platform="cpu")(lambda x, weight, epsilon: x)
    with pytest.raises(OverrideError, match=r"replace kernels\.norm; what can be replaced"):
        overrides.override("kernels.norm", platform="cpu")(negated)


def negated(x, weight, epsilon):
    return -torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def test_the_checker_lists_overrides_and_refuses_broken_ones(install):
    install(vendor="vendor.plugin:TWICE")
    spec, _ = resolved("recipe=tiny", "platform=cpu", "data.mock=true")
    (note,) = [finding for finding in check(spec) if finding.rule == "platform.overrides"]
    assert (note.severity, note.message) == (
        "note",
        "kernels.rms_norm.rms_norm is replaced by vendor.norm:twice (vendor 1.0)",
    )
    assert ("overrides", "kernels.rms_norm.rms_norm by vendor.norm:twice (vendor 1.0)") in overrides_row(spec)
    install(vendor="vendor.plugin:UNKNOWN")
    (problem,) = [finding for finding in check(spec) if finding.rule == "platform.overrides"]
    assert problem.severity == "error"
    assert overrides_row(spec) == []


def test_the_highest_priority_is_used_and_listed(install):
    install(other="vendor.plugin:FIRST", vendor="vendor.plugin:TWICE")
    assert rms_norm(X, WEIGHT, 1e-5) is X
    report = build_report(detect_machine(), [])
    rows = {row["operator"]: row["implementation"] for row in report["operators"]}
    assert rows["kernels.rms_norm.rms_norm, overridden"] == "vendor.norm:first (vendor 1.0)"
    assert {row["platform"]: row["state"] for row in report["platforms"]}["cpu"] == "used; overrides: 2"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "vendor.plugin:ABSENT",
            "vendor.absent:twice (vendor 1.0), which replaces kernels.rms_norm.rms_norm on cpu, cannot be impo",
        ),
        (
            "vendor.plugin:NARROW",
            "takes (x, weight), not (x, weight, epsilon); install its version for this megalaunch",
        ),
        (
            "vendor.plugin:UNKNOWN",
            "the overrides vendor of vendor replace kernels.rms_norm.norm; what can be replaced: kernels",
        ),
        ("vendor.plugin:NOWHERE", "the overrides vendor of vendor are for nowhere; platforms are cuda, musa"),
        ("vendor.plugin:LIST", "the overrides vendor of vendor are [1], not a tuple of Override and OverridePackage"),
        (
            "vendor.plugin:STRANGER",
            "vendor.modules:Stranger (vendor 1.0), which replaces engine.model.layers.Norm on cpu, is not a subclass "
            "of megalaunch.engine.model.layers.Norm; derive it from that",
        ),
        ("vendor.plugin:OTHER_SIZE", "takes (self, width, config), not (self, size, config, layout="),
        ("vendor.plugin:NO_PACKAGE", "the overrides vendor of vendor: there is no module vendor.nothing"),
        ("vendor.plugin:EMPTY", "vendor.empty has none of the modules engine.model.attention.attention, engine."),
        ("vendor.plugin:MISSPELT", "vendor.misspelt.kernels.rms_norm defines none of rms_norm, so it replaces nothing"),
        ("vendor.norm", "nothing at the top level of vendor.norm carries @override"),
        ("vendor.variable", "vendor.variable, line 5: @override takes literals, which are read without importing it"),
        ("vendor.keywords", "vendor.keywords, line 3: @override takes a target, platform= and priority="),
        ("vendor.none:LIST", "the overrides vendor of vendor cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_broken_override_is_an_error_and_never_the_original(install, entry, message):
    install(vendor=entry)
    with pytest.raises(OverrideError) as error, build_for(X.device):
        rms_norm(X, WEIGHT, 1e-5)
    assert message in str(error.value)


def test_two_of_one_priority_are_an_error_that_the_doctor_shows(install):
    install(other="vendor.plugin:TWICE", vendor="vendor.plugin:NARROW")
    (problem,) = build_report(detect_machine(), [])["problems"]
    assert "both replace kernels.rms_norm.rms_norm on cpu with priority 0" in problem["problem"]
    assert problem["fix"] == "uninstall one package, or change its priority"
