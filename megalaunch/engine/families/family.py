"""What the engine knows of a family: the names and forms of its tensors in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.multimodal import Multimodal
from megalaunch.engine.families.weight_mapping import WeightMapping


@dataclass(frozen=True)
class FamilyWeights:
    """The tensors of one family; `prefix` is what older files leave out before all names but the head's."""

    tensors: Callable[[ModelSpec], Iterator[WeightMapping]]
    prefix: str = ""
    dropped: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Endings of stored tensors that hold nothing learned: they are computed again."""
    multimodal: Multimodal | None = None
    """Names in the model of text and images that this family's decoder is a part of."""
