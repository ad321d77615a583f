"""A family's weights: names and transforms of its tensors in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megalaunch.engine.families.multimodal import Multimodal
from megalaunch.engine.families.weight_mapping import WeightMapping
from megalaunch.schema.model import ModelSpec


@dataclass(frozen=True)
class FamilyWeights:
    """The tensors of one family. Older files omit `prefix` before all names but the head's."""

    tensors: Callable[[ModelSpec], Iterator[WeightMapping]]
    prefix: str = ""
    dropped: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Suffixes of stored buffers, which are computed and not loaded."""
    multimodal: Multimodal | None = None
    """Tensor names in the multimodal model that contains this family's decoder."""
