"""How a published model of text and images calls the tensors of its text decoder, and those of images."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Multimodal:
    """How such a model calls what its decoder is made of."""

    layouts: tuple[Mapping[str, str], ...]
    """How the family's names begin, and how files have it instead; the published layout first."""
    vision: tuple[str, ...]
    """How the names of tensors begin that belong to images."""

    def layout(self, held: Collection[str]) -> Mapping[str, str]:
        """That of a folder which holds these tensors."""
        for layout in self.layouts:
            if any(name.startswith(tuple(layout.values())) for name in held):
                return layout
        return self.layouts[0]


def stored_name(name: str, layout: Mapping[str, str]) -> str:
    """A name of the family's own in a layout."""
    start = next((start for start in layout if name.startswith(start)), None)
    return name if start is None else layout[start] + name.removeprefix(start)
