"""The transformer layer: attention and the feed-forward block, which is an MLP or a mixture of experts.

Shapes: B batch, S sequence, s a rank's shard of it between tensor-parallel regions, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import Tensor, nn

from megalaunch.engine.model.attention.attention import Attention, LayerKVCache
from megalaunch.engine.model.attention.latent_attention import LatentAttention
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.config import DecoderConfig, LayerConfig
from megalaunch.engine.model.dropout import LayerDropoutMasks, maybe_dropout
from megalaunch.engine.model.layer_modules import (
    STANDARD_MODULES,
    AttentionModule,
    FeedForwardModule,
    LayerModules,
)
from megalaunch.engine.model.layers import Norm, add_and_normalize
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher, TokenDispatcher
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.model.transformer_block import TransformerBlock


class DecoderLayer(TransformerBlock):
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
        modules: LayerModules = STANDARD_MODULES,
    ) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = _norm(config, modules, before)
        self.attention = _attention(config, layer, modules, tp_region)
        self.attention_out_norm = _norm(config, modules, after)
        self.mlp_norm = _norm(config, modules, before)
        self.mlp = _feed_forward(config, layer, modules, tp_region, dispatcher, balancing)
        self.mlp_out_norm = _norm(config, modules, after)

    @property
    def moe_layer(self) -> MoELayer | None:
        """The feed-forward block, if it is a mixture of experts."""
        return self.mlp if isinstance(self.mlp, MoELayer) else None

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
        attention_out = maybe_dropout(self.attention_out_norm(attention_out), dropout_masks.attention_output)
        if self.parallel:
            residual, normed = x_BSH + attention_out, self.mlp_norm(x_BSH)
        else:
            residual, normed = add_and_normalize(x_BSH, attention_out, self.mlp_norm)
        jitter = dropout_masks.router_jitter
        moe = self.moe_layer
        mlp = self.mlp if jitter is None or moe is None else partial(moe, jitter=jitter)
        mlp_out = self.mlp_out_norm(mlp(normed))
        return residual + maybe_dropout(mlp_out, dropout_masks.mlp_output)


def make_block(
    config: DecoderConfig,
    layer: LayerConfig,
    modules: LayerModules,
    tp_region: TPRegion,
    dispatcher: TokenDispatcher | None = None,
    balancing: Balancing = ONE_RANK,
) -> TransformerBlock:
    """Build one layer of the decoder; arguments as `Decoder`'s."""
    if modules.block is not None:
        block = modules.block(config, layer, tp_region)
        if not isinstance(block, TransformerBlock):  # recomputation would skip it without a sign
            raise TypeError(f"{type(block).__name__} is no TransformerBlock: derive a block from it (megalaunch.nn)")
        return block
    return DecoderLayer(config, layer, tp_region, dispatcher, balancing, modules)


def _attention(
    config: DecoderConfig, layer: LayerConfig, modules: LayerModules, tp_region: TPRegion
) -> AttentionModule:
    if modules.attention is None:
        kind = Attention if config.attention.latent is None else LatentAttention
        return kind(config.hidden_size, config.attention, config.norm, tp_region)
    made = modules.attention(config, layer, tp_region)
    _require_policy(made, "core_save_policy")
    return cast(AttentionModule, made)


def _feed_forward(
    config: DecoderConfig,
    layer: LayerConfig,
    modules: LayerModules,
    tp_region: TPRegion,
    dispatcher: TokenDispatcher | None,
    balancing: Balancing,
) -> FeedForwardModule:
    if modules.mlp is not None:
        made = modules.mlp(config, layer, tp_region)
        _require_policy(made, "save_policy")
        return cast(FeedForwardModule, made)
    if config.moe is None or not layer.experts:
        return MLP(config.hidden_size, config.mlp, tp_region)
    dispatcher = LocalDispatcher(config.moe.num_experts) if dispatcher is None else dispatcher
    return MoELayer(config.hidden_size, config.moe, tp_region, dispatcher, balancing)


def _require_policy(module: nn.Module, name: str) -> None:
    """Raise TypeError for a module of a user's own that recomputation could not wrap: it would be skipped silently."""
    if not hasattr(module, name):
        raise TypeError(
            f"{type(module).__name__} has no attribute {name}: set it to save_activations, and call the function that "
            "recomputation may run again through it"
        )


def _norm(config: DecoderConfig, modules: LayerModules, present: bool) -> nn.Module:
    if not present:
        return nn.Identity()
    return Norm(config.hidden_size, config.norm) if modules.norm is None else modules.norm(config)
