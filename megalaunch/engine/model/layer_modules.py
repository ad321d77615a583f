"""The modules of a decoder layer, of which library users replace some by their own.

Such a module declares how its parameters are sharded (`ParamLayout`, as its attribute `layout` or
`<parameter>_layout`) and may declare how they are initialized (`ParamInit`, as `<parameter>_init`). It communicates
through the `TPRegion` that it is built with, where a tensor-parallel region starts and ends. Every layout follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megalaunch.engine.model.attention.attention import LayerKVCache
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.config import DecoderConfig, LayerConfig
from megalaunch.engine.model.layers import SavePolicy
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.model.transformer_block import TransformerBlock


class AttentionModule(Protocol):
    """The attention of a layer: `nn.Module`s that `DecoderLayer` calls between its norm and the residual stream.

    `core_save_policy` calls the part between the projections, so that recomputation can wrap it.
    """

    core_save_policy: SavePolicy

    def __call__(
        self,
        x_BSH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """Apply attention, [B, s, H] -> [B, s, H]."""


class FeedForwardModule(Protocol):
    """The feed-forward block of a layer; `save_policy` calls the whole block, so that recomputation can wrap it."""

    save_policy: SavePolicy

    def __call__(self, x_BSH: Tensor) -> Tensor:
        """Apply the block, [B, s, H] -> [B, s, H]."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the block and the modules in it."""


@dataclass(frozen=True)
class LayerModules:
    """How to build the modules of every layer; None: as the model section says.

    Attributes:
        attention: Builds an `AttentionModule`.
        mlp: Builds a `FeedForwardModule`, also in layers that have experts otherwise.
        norm: Builds the norms before and after both: modules that map [B, s, H] -> [B, s, H].
        block: Builds the whole layer; the others then have no effect.
    """

    attention: Callable[[DecoderConfig, LayerConfig, TPRegion], nn.Module] | None = None
    mlp: Callable[[DecoderConfig, LayerConfig, TPRegion], nn.Module] | None = None
    norm: Callable[[DecoderConfig], nn.Module] | None = None
    block: Callable[[DecoderConfig, LayerConfig, TPRegion], TransformerBlock] | None = None


STANDARD_MODULES = LayerModules()
