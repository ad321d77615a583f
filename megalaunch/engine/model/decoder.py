"""The decoder: embedding, layers, final norm and head, assembled from a plain config.

Layers sit in a ModuleDict under their global index, so that names stay the same on a pipeline stage
that holds only some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalaunch.engine.layout import COLUMNS
from megalaunch.engine.model.attention import Attention, KeyValueStore
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.context import WHOLE_SAMPLE, Attend, Context
from megalaunch.engine.model.embedding import Embedding
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import GatedMLP
from megalaunch.engine.model.norm import RMSNorm
from megalaunch.engine.model.rope import Rotation, rotation_of


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything the decoder's shape depends on, with no null left."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    init_std: float
    embedding_init_std: float


class DecoderLayer(nn.Module):
    """Pre-norm residual block: attention, then the feed-forward block."""

    def __init__(self, config: DecoderConfig, boundary: Boundary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config.hidden_size, config.num_heads, config.num_groups, config.head_dim, boundary)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = GatedMLP(config.hidden_size, config.ffn_hidden_size, boundary)

    def forward(
        self,
        x_BSH: Tensor,
        rotation: Rotation,
        attend: Attend,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), rotation, attend, store)
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


class Decoder(nn.Module):
    """Token ids [B, S] -> logits [B, S, V]; of a rank's part of the vocabulary where a boundary divides it."""

    def __init__(self, config: DecoderConfig, boundary: Boundary = ONE_DEVICE, context: Context = WHOLE_SAMPLE) -> None:
        super().__init__()
        self.config, self.boundary, self.context = config, boundary, context
        # A pipeline stage has the first and the last parts only if it is the first or the last.
        self.embedding: Embedding | None = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, boundary) for index in range(config.num_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.head: Linear | None = Linear(config.hidden_size, config.vocab_size, COLUMNS)
        self.tie()

    def tie(self) -> None:
        """Let the head share the embedding's matrix, if the config says so; again after `to_empty`, which unties."""
        if self.config.tied_embeddings and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.parameters()).device

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        stores: Sequence[KeyValueStore] | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after each position; on a pipeline stage before the last, what the next one needs.

        `x`: token ids [B, S], or on a stage after the first what the one before it gave, [B, s, H]. `positions` of
        these tokens, [S] or [B, S]; None: 0, 1, ..., on the first stage only. `stores`: one a layer, for generation,
        in which every rank holds all of a sample.
        `documents_BS`: numbers of the documents the tokens belong to, which do not see each other; all see all when
        None.
        """
        held = x.shape[1] if positions is None else positions.shape[-1]
        if positions is None:
            positions = self.context.places(held, x.device)
        context = self.context if stores is None else WHOLE_SAMPLE
        attends = context.attention(held, documents_BS, self.config.num_layers)
        if self.embedding is not None:
            x = self.boundary.embed(x, self.embedding)
        rotation = rotation_of(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for name, layer in self.layers.items():
            x = layer(x, rotation, attends[int(name)], stores[int(name)] if stores is not None else None)
        if self.norm is None or self.head is None:
            return x
        (logits_BSV,) = self.boundary.enter(self.norm(x), self.head)
        return logits_BSV
