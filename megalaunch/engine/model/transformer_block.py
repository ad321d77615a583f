"""The interface of a layer of the decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megalaunch.engine.model.attention.attention import LayerKVCache
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.dropout import NO_DROPOUT, LayerDropoutMasks
from megalaunch.engine.model.layers import SavePolicy, save_activations
from megalaunch.engine.model.rope import RopeCache

if TYPE_CHECKING:
    from megalaunch.engine.model.moe.moe_layer import MoELayer


class TransformerBlock(nn.Module, ABC):
    """A layer of the decoder, which recomputation and offloading wrap as a whole.

    Shapes: B batch, s a rank's shard of the sequence between tensor-parallel regions, H hidden.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_policy: SavePolicy = save_activations

    @property
    def moe_layer(self) -> MoELayer | None:
        """The mixture of experts in this layer; None without one."""
        return None

    def forward(
        self,
        x_BSH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None = None,
        dropout_masks: LayerDropoutMasks = NO_DROPOUT,
    ) -> Tensor:
        """Apply the layer, [B, s, H] -> [B, s, H]; `rotation` None: no RoPE; `layer_cache`: in generation only."""
        return self.save_policy(self.transform, x_BSH, rotation, attend, layer_cache, dropout_masks)

    @abstractmethod
    def transform(
        self,
        x_BSH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None,
        dropout_masks: LayerDropoutMasks,
    ) -> Tensor:
        """Apply the layer, as a function that the save policy may call again: a pure function of its inputs."""
