"""The transformer layer: attention and the feed-forward block, which is an MLP or a mixture of experts.

Shapes: B batch, S sequence, s a rank's shard of it between tensor-parallel regions, H hidden.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalaunch.engine.model.attention.attention import Attention, LayerKVCache
from megalaunch.engine.model.attention.latent_attention import LatentAttention
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.config import DecoderConfig, LayerConfig
from megalaunch.engine.model.dropout import NO_DROPOUT, LayerDropoutMasks, maybe_dropout
from megalaunch.engine.model.layers import Norm, SavePolicy, save_activations
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher, TokenDispatcher
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.model.tp_region import TPRegion


class DecoderLayer(nn.Module):
    """Transformer layer: attention and the feed-forward block, each added to the residual stream.

    Sequential: h = x + attention(norm(x)), y = h + mlp(norm(h)). Parallel: y = x + attention(norm(x)) + mlp(norm(x)).
    Norms are applied to the inputs of both blocks (`norm_placement` pre), to their outputs (post), or to both.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        tp_region: TPRegion,
        dispatcher: TokenDispatcher | None = None,
        balancing: Balancing = ONE_RANK,
    ) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.save_policy: SavePolicy = save_activations
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = _norm(config, before)
        kind = Attention if config.attention.latent is None else LatentAttention
        self.attention: Attention | LatentAttention = kind(config.hidden_size, config.attention, config.norm, tp_region)
        self.attention_out_norm = _norm(config, after)
        self.mlp_norm = _norm(config, before)
        self.mlp = _feed_forward(config, layer, tp_region, dispatcher, balancing)
        self.mlp_out_norm = _norm(config, after)

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

    def transform(
        self,
        x_BSH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None,
        dropout_masks: LayerDropoutMasks,
    ) -> Tensor:
        """Apply the layer, as a function that the save policy may call again."""
        attention_out = self.attention(
            self.attention_norm(x_BSH), rotation, attend, layer_cache, dropout_masks.attention_seeds
        )
        residual = x_BSH + maybe_dropout(self.attention_out_norm(attention_out), dropout_masks.attention_output)
        jitter = dropout_masks.router_jitter
        mlp = self.mlp if jitter is None or isinstance(self.mlp, MLP) else partial(self.mlp, jitter=jitter)
        mlp_out = self.mlp_out_norm(mlp(self.mlp_norm(x_BSH if self.parallel else residual)))
        return residual + maybe_dropout(mlp_out, dropout_masks.mlp_output)


def _feed_forward(
    config: DecoderConfig,
    layer: LayerConfig,
    tp_region: TPRegion,
    dispatcher: TokenDispatcher | None,
    balancing: Balancing,
) -> MLP | MoELayer:
    if config.moe is None or not layer.experts:
        return MLP(config.hidden_size, config.mlp, tp_region)
    dispatcher = LocalDispatcher(config.moe.num_experts) if dispatcher is None else dispatcher
    return MoELayer(config.hidden_size, config.moe, tp_region, dispatcher, balancing)


def _norm(config: DecoderConfig, present: bool) -> nn.Module:
    return Norm(config.hidden_size, config.norm) if present else nn.Identity()
