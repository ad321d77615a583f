"""Modules and declarations for layers of one's own (docs/library.md); needs `megalaunch[train]`."""

from megalaunch.engine.model.attention.attention import Attention, LayerKVCache
from megalaunch.engine.model.attention.score_mod import AttentionFn, ScoreMod
from megalaunch.engine.model.config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
)
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.decoder_layer import DecoderLayer
from megalaunch.engine.model.dropout import LayerDropoutMasks
from megalaunch.engine.model.layer_modules import AttentionModule, FeedForwardModule, LayerModules
from megalaunch.engine.model.layers import Norm, SavePolicy, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.param_init import ParamInit
from megalaunch.engine.model.rope import RopeCache, apply_rope
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.model.transformer_block import TransformerBlock
from megalaunch.engine.param_layout import (
    COLUMN_PARALLEL,
    REPLICATED,
    REPLICATED_PER_HEAD,
    ROW_PARALLEL,
    ParamLayout,
    local_param,
)

__all__ = [
    "COLUMN_PARALLEL",
    "MLP",
    "REPLICATED",
    "REPLICATED_PER_HEAD",
    "ROW_PARALLEL",
    "Attention",
    "AttentionConfig",
    "AttentionFn",
    "AttentionModule",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "FeedForwardModule",
    "LayerConfig",
    "LayerDropoutMasks",
    "LayerKVCache",
    "LayerModules",
    "Linear",
    "MLPConfig",
    "Norm",
    "NormConfig",
    "ParamInit",
    "ParamLayout",
    "RopeCache",
    "RopeConfig",
    "SavePolicy",
    "ScoreMod",
    "TPRegion",
    "TransformerBlock",
    "apply_rope",
    "local_param",
    "save_activations",
]
