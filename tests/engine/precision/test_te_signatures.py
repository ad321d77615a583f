"""What is called of Transformer Engine, and what its stand-ins take, against the signatures of published versions."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import te_attention_stand_in
import transformer_engine_stand_in
from paths import ROOT
from te_signatures import OLDEST, modules_with, published, signatures_in, signatures_of_file

from megalaunch.engine.model.attention.transformer_engine import load_te_attention
from megalaunch.engine.precision.transformer_engine import UnknownTransformerEngine, load_transformer_engine

VERSIONS = tuple(published())
SUPPORTED = VERSIONS[VERSIONS.index(OLDEST) :]
TOO_OLD = "2.3.0"
INSTALLED = importlib.util.find_spec("transformer_engine")


@pytest.fixture(autouse=True)
def attention_is_bound_anew(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")  # so that what the adapter sets ends with the test
    load_te_attention.cache_clear()
    yield
    load_te_attention.cache_clear()


def _install(monkeypatch, signatures, version):
    for name, module in modules_with(signatures, version).items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_supported_version_has_all_that_is_called(version, monkeypatch):
    _install(monkeypatch, published()[version], version)
    assert load_transformer_engine()
    assert load_te_attention().description == f"Transformer Engine {version}"


def test_what_an_older_version_lacks_is_named(monkeypatch):
    """Its attention is called as that of the supported ones."""
    _install(monkeypatch, published()[TOO_OLD], TOO_OLD)
    with pytest.raises(UnknownTransformerEngine, match=r"transformer_engine has no pytorch\.autocast; "):
        load_transformer_engine()
    assert load_te_attention().description == f"Transformer Engine {TOO_OLD}"


@pytest.mark.parametrize("stand_in", [transformer_engine_stand_in, te_attention_stand_in])
@pytest.mark.parametrize("version", SUPPORTED)
def test_stand_ins_take_nothing_that_a_version_does_not(version, stand_in):
    """In the same order, and with the same defaults, which a later version may add."""
    taken, known = signatures_of_file(Path(stand_in.__file__)), published()[version]
    assert len(taken) >= 3
    for path, signature in taken.items():
        names = [name for name in known[path] if name in signature]
        assert names == list(signature), path
        changed = {name for name, default in signature.items() if default not in (None, known[path][name])}
        assert not changed, path


def test_the_oldest_version_is_that_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["te"] == [f"transformer-engine[pytorch]>={OLDEST.removesuffix('.0')}"]


@pytest.mark.skipif(INSTALLED is None, reason="transformer-engine is not installed")
def test_the_installed_sources_have_all_that_is_called(monkeypatch):
    """They are read, not imported: the import needs CUDA."""
    folder = Path(INSTALLED.origin).parents[1]

    def read(module):
        stem = folder.joinpath(*module.split("."))
        files = [file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.exists()]
        return files[0].read_text() if files else None

    _install(monkeypatch, signatures_in(read), "installed")
    assert load_transformer_engine()
    assert load_te_attention()
