"""The loss of multi-token prediction in plain torch: every document alone, cut where a depth runs out of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.multi_token import MultiTokenDepth
from megalaunch.engine.model.rope import rope_cos_sin
from megalaunch.schema import RunSpec


def plain_mtp_loss(spec: RunSpec, model: Decoder, rows: Sequence[Sample]) -> Tensor:
    """coeff / D of the sum over depths of the mean loss of a depth's tokens; 0 without depths."""
    depths = spec.model.mtp.num_layers
    found: list[list[Tensor]] = [[] for _ in range(depths)]
    for row in rows if depths else ():
        for depth, losses in _depth_losses(model, row):
            found[depth].append(losses)
    means = [torch.cat(losses).mean() for losses in found]
    return sum(means, torch.zeros(())) * spec.model.mtp.loss_coeff / max(depths, 1)


def _depth_losses(model: Decoder, row: Sample) -> Iterator[tuple[int, Tensor]]:
    """Yield the losses of each depth's tokens that count, document by document."""
    tokens = torch.from_numpy(row.tokens)
    length = len(tokens) - 1
    counted = torch.ones(length, dtype=torch.bool) if row.loss_mask is None else torch.from_numpy(row.loss_mask)
    documents = np.zeros(length, np.int64) if row.document_ids is None else row.document_ids
    for piece in np.split(np.arange(length), np.flatnonzero(np.diff(documents)) + 1):
        x = model(tokens[None, piece], logits=False)
        for number, depth in enumerate(model.mtp.values()):
            further = torch.from_numpy(piece[number + 1 :])
            if not len(further):
                break
            assert isinstance(depth, MultiTokenDepth)
            x = _one_depth(model, depth, x[:, : len(further)], tokens[None, further])
            losses = F.cross_entropy(x[0] @ model.head.weight.T, tokens[further + 1], reduction="none")
            yield number, losses[counted[further]]


def _one_depth(model: Decoder, depth: MultiTokenDepth, x: Tensor, tokens: Tensor) -> Tensor:
    embedded = model.embedding.weight[tokens]
    joined = torch.cat((_rms(embedded, depth.embedding_norm), _rms(x, depth.hidden_norm)), dim=-1)
    rope = model.config.mtp_layers[0].rope
    rotation = None if rope is None else rope_cos_sin(torch.arange(x.shape[1]), rope, x.dtype)
    return _rms(depth.layer(joined @ depth.projection.weight.T, rotation, causal_attention), depth.norm)


def _rms(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.config.epsilon).rsqrt() * norm.weight
