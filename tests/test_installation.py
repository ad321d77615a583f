"""The command that installs a package, by the environment."""

import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

from megalaunch.installation import install_command


@pytest.mark.parametrize(
    ("marker", "extra", "package"),
    [
        (None, "pip install 'megalaunch[train]'", "pip install nltk"),
        ("uv-receipt.toml", "uv tool install 'megalaunch[train]'", "uv tool install --with nltk megalaunch"),
        ("pipx_metadata.json", "pipx install --force 'megalaunch[train]'", "pipx inject megalaunch nltk"),
    ],
)
def test_the_command_is_of_what_installed_megalaunch(tmp_path, monkeypatch, marker, extra, package):
    if marker is not None:
        (tmp_path / marker).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: object())
    assert install_command("megalaunch[train]") == extra
    assert install_command("nltk") == package


def test_an_environment_without_pip_is_of_uv(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    assert install_command("torch>=2.12") == "uv pip install 'torch>=2.12'"


def test_it_is_told_without_warnings_of_setuptools():
    """They would be printed where a package is missing, as setuptools takes the search for pip for a start of pip."""
    pytest.importorskip("setuptools")
    told = "import sys, distutils; from megalaunch.installation import install_command; print(install_command('nltk'))"
    done = subprocess.run((sys.executable, "-c", told), capture_output=True, text=True, check=True)
    assert done.stdout.endswith("pip install nltk\n")
    assert done.stderr == ""
