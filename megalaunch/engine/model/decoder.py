"""The decoder: embedding, layers, final norm and head, assembled from a plain config.

Layers sit in a ModuleDict under their global index, so that names stay the same on a pipeline stage
that holds only some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megalaunch.engine.layout import COLUMNS
from megalaunch.engine.model.attention import Attention, KeyValueStore, KeyValueStores
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.config import DecoderConfig, RopeConfig
from megalaunch.engine.model.context import WHOLE_SAMPLE, Attend, Context
from megalaunch.engine.model.dropout import NOTHING, Drop, Drops, LayerDrops, drops_of, nothing
from megalaunch.engine.model.embedding import Embedding
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.norm import Norm
from megalaunch.engine.model.rope import Rotation, rotation_of
from megalaunch.engine.model.scores import capped
from megalaunch.plan.parameters import vocabulary_rows


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each added to the stream; or both added at once."""

    def __init__(self, config: DecoderConfig, boundary: Boundary) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        before, after = config.block_norms != "post", config.block_norms != "pre"
        self.attention_norm = _norm(config, before)
        self.attention = Attention(config.hidden_size, config.attention, config.norm, boundary)
        self.attention_out_norm = _norm(config, after)
        self.mlp_norm = _norm(config, before)
        self.mlp = MLP(config.hidden_size, config.mlp, boundary)
        self.mlp_out_norm = _norm(config, after)

    def forward(
        self,
        x_BSH: Tensor,
        rotation: Rotation | None,
        attend: Attend,
        store: KeyValueStore | None = None,
        drops: LayerDrops = NOTHING,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        attended = self.attention(self.attention_norm(x_BSH), rotation, attend, store, drops.weights)
        between = x_BSH + _dropped(self.attention_out_norm(attended), drops.attended)
        fed = self.mlp_out_norm(self.mlp(self.mlp_norm(x_BSH if self.parallel else between)))
        return between + _dropped(fed, drops.fed)


DIVIDED_BY_VOCABULARY = ("embedding.weight", "head.weight")
"""Parameters with a row for each token."""


def unpadded(name: str, shape: torch.Size, vocab_size: int) -> torch.Size:
    """The shape of a parameter, or of a moment that is named after it, without rows that pad the vocabulary."""
    if not any(name == own or name.endswith(f".{own}") for own in DIVIDED_BY_VOCABULARY):
        return shape
    return torch.Size((min(shape[0], vocab_size), *shape[1:]))


def _dropped(x_BSH: Tensor, drop: Drop | None) -> Tensor:
    return x_BSH if drop is None else drop(x_BSH)


def _norm(config: DecoderConfig, present: bool) -> nn.Module:
    return Norm(config.hidden_size, config.norm) if present else nn.Identity()


class Decoder(nn.Module):
    """Token ids [B, S] -> logits [B, S, V]; of a rank's part of the vocabulary where a boundary divides it.

    Where its ranks cannot share the vocabulary out, embedding and head have `vocabulary_rows` > V rows.

    `narrow` is the format of blocks beside a residual stream in fp32; None: the stream has the blocks' format.
    """

    def __init__(
        self,
        config: DecoderConfig,
        boundary: Boundary = ONE_DEVICE,
        context: Context = WHOLE_SAMPLE,
        narrow: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.boundary, self.context, self.narrow = config, boundary, context, narrow
        self.vocabulary_rows = vocabulary_rows(config.vocab_size, boundary.vocabulary.size)
        self.num_tokens = config.vocab_size  # fewer where the weights, and the tokenizer, know fewer
        # A pipeline stage has the first and the last parts only if it is the first or the last.
        self.embedding: Embedding | None = Embedding(
            self.vocabulary_rows, config.hidden_size, config.learned_positions, config.embedding_scale
        )
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, boundary) for index in range(config.num_layers)})
        self.norm: Norm | None = Norm(config.hidden_size, config.norm)
        self.head: Linear | None = Linear(config.hidden_size, self.vocabulary_rows, COLUMNS)
        self.spans: Sequence[Sequence[str]] = ()
        """Names of layers that `through` passes at once; empty: each by itself."""
        self.tie()

    def tie(self) -> None:
        """Let the head share the embedding's matrix, if the config says so; again after `to_empty`, which unties."""
        if self.config.tied_embeddings and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    @property
    def vocabulary_columns(self) -> int:
        """How many of this rank's logits are those of tokens: the first ones; what follows is padding."""
        axis = self.boundary.vocabulary
        width = self.vocabulary_rows // axis.size
        return min(max(self.num_tokens - axis.rank * width, 0), width)

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.parameters()).device

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        stores: KeyValueStores | None = None,
        documents_BS: Tensor | None = None,
        logits: bool = True,
        streams_B: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after each position; on a pipeline stage before the last, what the next one needs.

        `x`: token ids [B, S], or on a stage after the first what the one before it gave, [B, s, H]. `positions` of
        these tokens, [S] or [B, S]; None: 0, 1, ..., on the first stage only. `stores`: for generation, in which
        every rank holds all of a sample; then logits are those after the last position alone, [B, 1, V].
        `documents_BS`: numbers of the documents the tokens belong to, which do not see each other; all see all when
        None. `streams_B`: what dropout is drawn from (model/dropout.py); nothing is dropped when None.
        `logits` False: not they but what the head makes them from, [B, s, H].
        """
        held = x.shape[1] if positions is None else positions.shape[-1]
        if positions is None:
            positions = self.context.places(held, x.device)
        windows = [layer.window for layer in self.config.layers]
        if stores is None:
            attends = self.context.attention(held, documents_BS, windows, x.device)
        else:
            attends = stores.attention(held, windows)
        drops = nothing(self.layers)
        if streams_B is not None:
            places = self.context.places(held, x.device)
            drops = drops_of(self.config, self.boundary, streams_B, places, list(self.layers))
        if self.embedding is not None:
            x = _dropped(self.embedding.vectors(x, positions, self.boundary), drops.embedded)
            x = x if self.narrow is None else x.float()
        ropes = {layer.rope for layer in self.config.layers}
        rotations = {rope: rotation_of(positions, rope, self.narrow or x.dtype) if rope else None for rope in ropes}
        for names in self.spans or tuple((name,) for name in self.layers):
            x = self.through(names, x, rotations, attends, stores, drops)
        if self.norm is None or self.head is None:
            return x
        if stores is not None:
            x = x[:, -1:]  # what text goes on with
        x = self.norm(x)
        if not logits:
            return x
        (logits_BSV,) = self.boundary.enter(x, self.head)
        return self.capped_logits(logits_BSV)

    def capped_logits(self, logits: Tensor) -> Tensor:
        """What the head gives, kept below the config's soft cap if it has one."""
        cap = self.config.logit_soft_cap
        return logits if cap is None else capped(logits, cap)

    def through(
        self,
        names: Sequence[str],
        x: Tensor,
        rotations: Mapping[RopeConfig | None, Rotation | None],
        attends: Sequence[Attend],
        stores: KeyValueStores | None,
        drops: Drops,
    ) -> Tensor:
        """The layers of these names, one after the other."""
        for name in names:
            index = int(name)
            rotation = rotations[self.config.layers[index].rope]
            store = stores[index] if stores is not None else None
            x = self.layers[name](x, rotation, attends[index], store, drops.layers[name])
        return x
