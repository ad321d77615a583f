"""Sources say what does not fit before anything is imported, and say nothing where they cannot know."""

from __future__ import annotations

import pytest
from installed_package import install_package

from megalaunch.platform.plugin_sources import SourceError, find_definition, find_misfit

FUNCTION = "megalaunch.kernels.rms_norm:rms_norm"
CLASS = "megalaunch.engine.model.layers:Norm"
METHOD = "megalaunch.engine.model.layers:Norm.normalize"
SOURCE = """
import functools
from elsewhere import imported, other as renamed

def fits(x: object, weight: object, epsilon: float = 1e-5) -> object: ...
def same(x, weight: int, epsilon) -> int: ...
def narrow(x, weight): ...
def keyword(x, weight, *, epsilon): ...
def method(self, x): ...

@functools.cache
def decorated(*args): ...

if True:
    def conditional(x): ...
else:
    conditional = fits

def twice(x): ...
twice = functools.partial(fits)

class Base: ...
class Alone: ...
class Inherits(Base): ...
class Same(Base):
    def __init__(self, size, config, layout=None, tp_region=None): ...
class Other(Base):
    def __init__(self, size): ...
"""


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    files = {"sourced/code.py": SOURCE, "sourced/star.py": "from elsewhere import *\n", "sourced/bad.py": "def f(:\n"}
    install_package(tmp_path, files, {})
    (tmp_path / "sourced/compiled.abi3.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_what_fits_or_is_not_known_is_no_misfit(vendor):
    for name in ("same", "imported", "renamed", "decorated", "conditional", "twice"):
        assert find_misfit(f"sourced.code:{name}", FUNCTION) is None, name
    assert find_misfit("sourced.star:anything", FUNCTION) is None
    assert find_misfit("sourced.compiled:anything", FUNCTION) is None
    assert find_misfit("sourced.code:method", METHOD) is None
    assert find_misfit("sourced.code:Inherits", CLASS) is None
    assert find_definition(FUNCTION).name == "rms_norm"


@pytest.mark.parametrize(
    ("name", "original", "cause"),
    [
        ("narrow", FUNCTION, "takes (x, weight), not (x, weight, epsilon)"),
        ("fits", FUNCTION, "takes (x, weight, epsilon=1e-05), not (x, weight, epsilon)"),
        ("keyword", FUNCTION, "takes (x, weight, *, epsilon), not (x, weight, epsilon)"),
        ("same", METHOD, "takes (x, weight, epsilon), not (self, x)"),
        ("Alone", CLASS, "is not a subclass of megalaunch.engine.model.layers.Norm"),
        ("same", CLASS, "is not a subclass of megalaunch.engine.model.layers.Norm"),
        ("Other", CLASS, "takes (self, size), not (self, size, config, layout="),
    ],
)
def test_a_misfit_is_found(vendor, name, original, cause):
    assert find_misfit(f"sourced.code:{name}", original)[0].startswith(cause)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("sourced.absent:f", "there is no module sourced.absent"),
        ("sourced.code:absent", "sourced.code has no absent"),
        ("sourced.code", "sourced.code is not of the form module:name"),
        ("sourced.bad:f", "sourced.bad cannot be read: invalid syntax"),
    ],
)
def test_what_cannot_be_found_is_an_error(vendor, place, said):
    with pytest.raises(SourceError, match=said):
        find_misfit(place, FUNCTION)
