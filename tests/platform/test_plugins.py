"""A platform and a chip of another package, installed beside megalaunch: found by its entry point, without torch."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from megalaunch.platform.overrides import OVERRIDABLE, place_of
from megalaunch.platform.plugin_sources import find_definition

PLUGIN = re.search(r"```python\n(.*?)```", (ROOT / "docs/platforms.md").read_text(), re.DOTALL)[1]
OTHERS = """
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformPlugin

def plugin(chip, device="weft", implementation="warp_megalaunch.device:WarpPlatform"):
    facts = PlatformFacts("weft", "wccl", implementation, "WEFT_VISIBLE_DEVICES")
    return PlatformPlugin(facts, (ChipFacts(chip, device, 2**36, {}, "wccl", "WEFT_VISIBLE_DEVICES", None),))

OUR_CHIP = plugin("h100")
ITS_CHIP = plugin("warp9")
NO_CLASS = plugin("weft1", implementation="warp_megalaunch.device:Absent")
OTHER_DEVICE = plugin("weft1", "warp")
"""
DETECT = """
import json, sys
from pathlib import Path
from made_specs import resolved
from megalaunch.plan.check import check
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import detect_machine
machine = detect_machine(Path(sys.argv[1]), {"PATH": "", "WARP_VISIBLE_DEVICES": "0,2"})
spec, _ = resolved("recipe=llama3_8b", "platform.chip=warp9")
findings = [finding.rule for finding in check(spec, None, "plan") if finding.severity == "error"]
print(json.dumps([machine.chip.name, machine.devices, machine.problem, spec.precision.compute_dtype,
                  spec.cluster.devices_per_node, findings, len(CHIPS), "torch" in sys.modules]))
"""


@pytest.fixture
def installed(tmp_path):
    """Install the package of docs/platforms.md into a scratch environment; `install` adds a second distribution."""
    site = tmp_path / "site"

    def install(name: str, value: str) -> None:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[megalaunch.platforms]\nwarp = {value}\n")

    (site / "warp_megalaunch").mkdir(parents=True)
    (site / "warp_megalaunch/__init__.py").touch()
    (site / "warp_megalaunch/plugin.py").write_text(PLUGIN)
    (site / "warp_megalaunch/device.py").write_text("class WarpPlatform:\n    pass\n")
    (site / "warp_megalaunch/others.py").write_text(OTHERS)
    (site / "torch_warp.py").touch()
    install("warp_megalaunch", "warp_megalaunch.plugin:PLUGIN")
    (tmp_path / "dev").mkdir()
    for node in ("warp0", "warp1", "warp2"):
        (tmp_path / "dev" / node).touch()
    return site, install


def _run(site: Path) -> list[object]:
    environ = {**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'tests/support'}"}
    command = [sys.executable, "-c", DETECT, str(site.parent)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_names_what_can_be_replaced_with_its_parameters():
    listed = re.findall(r"`((?:kernels|engine)\.[\w.]+)(\(.*?\))?`(?= \||,)", (ROOT / "docs/platforms.md").read_text())
    for target, kind in OVERRIDABLE.items():
        (parameters,) = {given for name, given in listed if name == target}
        arguments = find_definition(place_of(target)).args if kind != "class" else None
        assert kind == "class" or parameters == f"({_names(arguments)})", target


def _names(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def test_a_package_adds_a_platform_and_a_chip(installed):
    site, _ = installed
    *found, chips, has_torch = _run(site)
    assert found == ["warp9", 2, None, "bf16", 8, []]
    assert (chips, has_torch) == (len(_own_chips()) + 1, False)


def _own_chips() -> list[str]:
    from megalaunch.platform.chips import CHIPS

    return list(CHIPS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("warp_megalaunch.absent:PLUGIN", "the platform warp of other cannot be loaded: ModuleNotFoundError"),
        ("warp_megalaunch:__name__", "the platform warp of other is 'warp_megalaunch', not a PlatformPlugin"),
        ("warp_megalaunch.plugin:PLUGIN", "both add the device type warp"),
        ("warp_megalaunch.others:OUR_CHIP", "the platform weft adds the chip h100, which exists"),
        ("warp_megalaunch.others:ITS_CHIP", "the platform weft adds the chip warp9, which exists"),
        ("warp_megalaunch.others:OTHER_DEVICE", "other has the device type weft, but its chip weft1 has warp"),
        (
            "warp_megalaunch.others:NO_CLASS",
            "other names the class warp_megalaunch.device:Absent, but warp_megalaunch.de",
        ),
    ],
)
def test_a_broken_package_is_an_error(installed, monkeypatch, value, message):
    from megalaunch.platform.chips import CHIPS
    from megalaunch.platform.detect import detect_machine
    from megalaunch.platform.plugins import PlatformError, plugins

    site, install = installed
    install("other", value)
    monkeypatch.syspath_prepend(str(site))
    plugins.cache_clear()
    try:
        with pytest.raises(PlatformError, match=message):
            len(CHIPS)
        assert message in detect_machine(site.parent, {"PATH": ""}).problem
    finally:
        plugins.cache_clear()
