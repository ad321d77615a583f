"""What a package lacks of the interface that is called."""

from __future__ import annotations

from types import SimpleNamespace

from megalaunch.platform.package_interface import missing_names


class Layer:
    def __init__(self, width: int, bias: bool = True) -> None: ...

    def forward(self, x: object) -> None: ...


PACKAGE = SimpleNamespace(Layer=Layer, attend=lambda q, k, *, causal=False: None)


def test_names_methods_and_arguments_that_are_not_there():
    bound = {
        "kit.Layer": ("width", "dtype"),
        "kit.Layer.forward": ("x",),
        "kit.Layer.backward": ("dy",),
        "kit.attend": ("causal", "window"),
        "kit.recipes": (),
    }
    assert missing_names({"kit": PACKAGE}, bound) == [
        "kit.Layer(dtype=)",
        "kit.Layer.backward",
        "kit.attend(window=)",
        "kit.recipes",
    ]


def test_a_package_with_all_of_it():
    assert missing_names({"kit": PACKAGE}, {"kit.Layer": ("width", "bias"), "kit.attend": ("causal",)}) == []


def test_keywords_for_a_base_class_are_not_known_before_the_call():
    package = SimpleNamespace(Norm=lambda size, **others: None)
    assert missing_names({"kit": package}, {"kit.Norm": ("size", "device")}) == []
