"""Tensor names of a published multimodal model: of its text decoder, and of its vision tower."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Multimodal:
    """The naming schemes of a multimodal model."""

    layouts: tuple[Mapping[str, str], ...]
    """Maps from prefixes of the family's names to those in files; the published layout comes first."""
    vision: tuple[str, ...]
    """Prefixes of the vision tower's tensors, which are skipped."""

    def layout(self, held: Collection[str]) -> Mapping[str, str]:
        """Return the layout of a folder that holds these tensors."""
        for layout in self.layouts:
            if any(name.startswith(tuple(layout.values())) for name in held):
                return layout
        return self.layouts[0]


def stored_name(name: str, layout: Mapping[str, str]) -> str:
    """Return the name in a layout of one of the family's names."""
    start = next((start for start in layout if name.startswith(start)), None)
    return name if start is None else layout[start] + name.removeprefix(start)
