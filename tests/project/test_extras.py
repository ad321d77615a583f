"""The extras of pyproject.toml: documented, named by the commands that need them, and whole."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from paths import ROOT

from megalaunch.platform.packages import OPTIONAL, PACKAGES

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGE = (ROOT / "docs/install.md").read_text()
DOCUMENTED = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)


def test_the_page_lists_every_extra_once():
    assert sorted(DOCUMENTED) == sorted(EXTRAS)


@pytest.mark.parametrize("package", [*PACKAGES, *OPTIONAL], ids=lambda package: package.name)
def test_a_missing_package_is_installed_by_the_extra_that_its_command_names(package):
    if not package.extra:
        return
    assert package.install_command == f"pip install 'megalaunch[{package.extra}]'"
    assert any(re.match(rf"{package.name}\b", requirement) for requirement in EXTRAS[package.extra])


def test_every_message_names_an_extra_that_exists():
    named = {
        extra
        for path in (ROOT / "megalaunch").rglob("*.py")
        for group in re.findall(r"megalaunch\[([\w,-]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert {"train", "data", "sweep", "lm-eval"} <= named
    assert named <= set(EXTRAS)


def test_all_has_what_runs_on_any_machine():
    [requirement] = EXTRAS["all"]
    included = set(re.findall(r"[\w-]+", requirement.partition("[")[2]))
    assert included == set(EXTRAS) - {"all", "lts", "te", "nvrx", "dev", "parity"}


def test_lts_pins_the_oldest_version_of_each_package_for_training():
    minimum = dict(requirement.split(">=") for requirement in EXTRAS["train"])
    pinned = dict(requirement.split("==") for requirement in EXTRAS["lts"])
    assert pinned.keys() == minimum.keys()
    assert all(f"{version}.".startswith(f"{minimum[name]}.") for name, version in pinned.items())


def test_the_conda_environment_names_a_supported_python_and_extras_that_exist():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert (python, pip) == ("python=3.11", "pip")
    assert packages["pip"][0] == "-c constraints.txt"
    assert set(packages["pip"][1].partition("[")[2].rstrip("]").split(",")) <= set(EXTRAS)
