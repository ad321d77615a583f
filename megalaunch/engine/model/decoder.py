"""The decoder: embedding, layers, final norm and head, assembled from a plain config.

Layers are in a ModuleDict under their global index, so that parameter names are the same on a pipeline stage that
holds only some of them.
Shapes: B batch, S sequence, s a rank's shard of it between tensor-parallel regions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megalaunch.engine.autograd import apply_tuple_function
from megalaunch.engine.model.attention.attention import KVCache
from megalaunch.engine.model.attention.core import NO_CP, ContextParallelism
from megalaunch.engine.model.attention.score_mod import AttentionFn, softcap
from megalaunch.engine.model.config import DecoderConfig, RopeConfig
from megalaunch.engine.model.decoder_layer import make_block
from megalaunch.engine.model.dropout import DropoutMasks, make_dropout_masks, maybe_dropout, no_dropout
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.model.layers import Contexts, Embedding, Norm, SavePolicy, save_activations
from megalaunch.engine.model.linear import CastsWeights, Linear
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.multi_token import MeetInOneNode, MultiTokenDepth
from megalaunch.engine.model.rope import RopeCache, rope_cos_sin
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.model.transformer_block import TransformerBlock
from megalaunch.engine.param_layout import COLUMN_PARALLEL
from megalaunch.engine.precision.amax_history import DelayedScales
from megalaunch.engine.precision.param_gather import ParamGather
from megalaunch.plan.parameters import vocabulary_rows

VOCAB_PARALLEL_PARAMS = ("embedding.weight", "head.weight")
"""Parameters with one row per token of the vocabulary, sharded by row."""


def strip_vocab_padding(name: str, shape: torch.Size, vocab_size: int) -> torch.Size:
    """Return the shape of a parameter, or an optimizer moment named after it, without the vocabulary's padding rows."""
    if not any(name == own or name.endswith(f".{own}") for own in VOCAB_PARALLEL_PARAMS):
        return shape
    return torch.Size((min(shape[0], vocab_size), *shape[1:]))


class Decoder(nn.Module):
    """The decoder: token ids [B, S] -> logits [B, S, V], or this rank's vocabulary shard of them.

    If tp does not divide V, embedding and head are padded to `vocabulary_rows` > V rows.

    Args:
        config: Shapes and settings of the whole decoder.
        tp_region: Tensor parallelism.
        context: Context parallelism.
        block_dtype: The dtype of the blocks if the residual stream is fp32; None: the stream has the blocks' dtype.
        dispatcher: Brings tokens to their experts; None: this rank holds all experts.
        balancing: What the losses of routers depend on besides their tokens.
        modules: The modules of a layer that replace the standard ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tp_region: TPRegion = NO_TP,
        context: ContextParallelism = NO_CP,
        block_dtype: torch.dtype | None = None,
        dispatcher: TokenDispatcher | None = None,
        balancing: Balancing = ONE_RANK,
        modules: LayerModules = STANDARD_MODULES,
    ) -> None:
        super().__init__()
        self.config, self.tp_region, self.context, self.block_dtype = config, tp_region, context, block_dtype
        self.layer_modules = modules
        self.vocabulary_rows = vocabulary_rows(config.vocab_size, tp_region.vocab_axis.size)
        self.num_tokens = config.vocab_size  # fewer where the weights and the tokenizer have fewer
        # `prune_to_stage` removes what a pipeline stage does not compute.
        self.embedding: Embedding | None = Embedding(
            self.vocabulary_rows, config.hidden_size, config.learned_positions, config.embedding_scale
        )
        self.layers = nn.ModuleDict(
            {
                str(index): make_block(config, layer, modules, tp_region, dispatcher, balancing)
                for index, layer in enumerate(config.layers)
            }
        )
        self.embeds_input = True
        """False on later stages, where the embedding is None or a copy for MTP depths."""
        self.norm: Norm | None = Norm(config.hidden_size, config.norm)
        self.head: Linear | None = Linear(config.hidden_size, self.vocabulary_rows, COLUMN_PARALLEL)
        self.mtp = nn.ModuleDict(
            {
                str(depth): MultiTokenDepth(config, layer, tp_region, dispatcher, balancing, modules)
                for depth, layer in enumerate(config.mtp_layers)
            }
        )
        self.amax_histories: DelayedScales | None = None  # of delayed fp8 scaling
        self.param_gather: ParamGather | None = None  # of weights in fp8
        self.library_layers: tuple[CastsWeights, ...] = ()  # that compute this part's linear layers and experts
        self.checkpoint_contexts: Contexts | None = None  # of layers whose scales change between both passes
        self.group_save_policy: SavePolicy = save_activations
        self.recompute_groups: Sequence[Sequence[str]] = ()
        """Names of the layers that one call of `forward_layers` runs; empty: one layer per call."""
        self.tie()

    def tie(self) -> None:
        """Tie the head to the embedding's weight, if the config says so. Call again after `to_empty` unties them."""
        if self.config.tie_word_embeddings and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    @property
    def has_standard_modules(self) -> bool:
        """Whether no module of a library user is among the layers'."""
        return self.layer_modules == STANDARD_MODULES

    @property
    def all_layers(self) -> dict[str, TransformerBlock]:
        """The layers, then those of MTP depths, by their index in `plan.layers.list_layers`."""
        depths = ((self.config.num_layers + int(depth), module.layer) for depth, module in self.mtp.items())
        numbered = {str(index): layer for index, layer in depths}
        return {**self.layers, **numbered}  # type: ignore[dict-item]

    @property
    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """The head, which the region computes (`ProjectionBlock`)."""
        return () if self.head is None else ((self.head,),)

    @property
    def vocabulary_columns(self) -> int:
        """How many of this rank's logits belong to tokens: the first ones. The rest are padding."""
        axis = self.tp_region.vocab_axis
        width = self.vocabulary_rows // axis.size
        return min(max(self.num_tokens - axis.rank * width, 0), width)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        kv_cache: KVCache | None = None,
        documents_BS: Tensor | None = None,
        logits: bool = True,
        seeds_B: Tensor | None = None,
        mtp_tokens_BDS: Tensor | None = None,
        last_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the next token's logits at each position, or the hidden states [B, s, H] for the next pipeline stage.

        Args:
            x: Token ids [B, S]; after the first pipeline stage the previous stage's hidden states [B, s, H].
            positions: Position ids [S] or [B, S]; None, on the first stage only: 0, 1, ...
            kv_cache: KV caches, for generation: every rank holds full sequences, and only the last logits [B, 1, V]
                are returned.
            documents_BS: Document ids: tokens attend within their document; None: to all earlier tokens.
            logits: False: return the head's input [B, s, H] in place of the logits.
            seeds_B: Dropout seeds (model/dropout.py); None: no dropout.
            mtp_tokens_BDS: For each MTP depth the tokens that its positions embed; None: MTP depths do not run. The
                batch dim of the result is then (1 + D) B: the decoder, and then each depth.
            last_positions: As for `rope_cos_sin`; needed where `positions` are those of a sequence shard.
        """
        length = x.shape[1] if positions is None else positions.shape[-1]
        if positions is None:
            positions = self.context.position_ids(length, x.device)
        windows = [layer.window for layer in self.config.all_layers]
        if kv_cache is None:
            attends = self.context.make_attention(length, documents_BS, windows, x.device)
        else:
            attends = kv_cache.attention(length, windows)
        dropout_masks = no_dropout(self.all_layers)
        if seeds_B is not None:
            places = self.context.token_places(length, documents_BS, x.device)
            dropout_masks = make_dropout_masks(self.config, self.tp_region, seeds_B, places, list(self.all_layers))
        if self.embeds_input:
            x = self._embed(x, positions, dropout_masks)
        ropes = {layer.rope for layer in self.config.all_layers}
        dtype = self.block_dtype or x.dtype
        rotations = {rope: rope_cos_sin(positions, rope, dtype, last_positions) if rope else None for rope in ropes}
        for names in self.recompute_groups or tuple((name,) for name in self.layers):
            x = self.group_save_policy(self.forward_layers, names, x, rotations, attends, kv_cache, dropout_masks)
        if kv_cache is not None and self.head is not None:
            x = x[:, -1:]  # only the last position's logits are sampled from
        if self.norm is not None:
            x = self.norm(x)
        if mtp_tokens_BDS is not None:
            x = self.predict_further(x, mtp_tokens_BDS, positions, rotations, attends, dropout_masks)
        if self.head is None:
            return x if self.block_dtype is None else x.float()
        x = x if self.block_dtype is None else x.to(self.block_dtype)  # of a norm on the stage before
        if not logits:
            return x
        (logits_BSV,) = self.tp_region.column_parallel_linear(x, self.head)
        return self.softcap_logits(logits_BSV)

    def _embed(self, tokens_BS: Tensor, positions: Tensor, dropout_masks: DropoutMasks) -> Tensor:
        """Embed token ids, [B, S] -> [B, s, H], in the dtype of the residual stream."""
        assert self.embedding is not None
        x = maybe_dropout(self.embedding.lookup(tokens_BS, positions, self.tp_region), dropout_masks.embedding)
        return x if self.block_dtype is None else x.float()

    def predict_further(
        self,
        x_BsH: Tensor,
        tokens_BDS: Tensor,
        positions: Tensor,
        rotations: Mapping[RopeConfig | None, RopeCache | None],
        attends: Sequence[AttentionFn],
        dropout_masks: DropoutMasks,
    ) -> Tensor:
        """Run the MTP depths of this stage on the head's input; return it and theirs, [(1 + D) B, s, H]."""
        if not self.mtp:
            return x_BsH
        every = [self._embed(tokens_BS, positions, dropout_masks) for tokens_BS in tokens_BDS.unbind(1)]
        x_BsH, *every = apply_tuple_function(MeetInOneNode, x_BsH, *every)
        outputs = [x_BsH]
        for (name, depth), embedded_BsH in zip(self.mtp.items(), every, strict=True):
            index = self.config.num_layers + int(name)
            rotation = rotations[self.config.all_layers[index].rope]
            masks = dropout_masks.layers[str(index)]
            outputs.append(depth(embedded_BsH, outputs[-1], rotation, attends[index], masks))
        return torch.cat(outputs)

    def softcap_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, soft-capped if the config has a cap."""
        cap = self.config.final_logit_softcapping
        return logits if cap is None else softcap(logits, cap)

    def forward_layers(
        self,
        names: Sequence[str],
        x: Tensor,
        rotations: Mapping[RopeConfig | None, RopeCache | None],
        attends: Sequence[AttentionFn],
        kv_cache: KVCache | None,
        dropout_masks: DropoutMasks,
    ) -> Tensor:
        """Run the layers `names` in order, [B, s, H] -> [B, s, H]."""
        for name in names:
            index = int(name)
            rotation = rotations[self.config.layers[index].rope]
            layer_cache = kv_cache[index] if kv_cache is not None else None
            x = self.layers[name](x, rotation, attends[index], layer_cache, dropout_masks.layers[name])
        return x
