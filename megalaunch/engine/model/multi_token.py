"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3 report, section 2.2): a chain of layers after the decoder.

With x_0 the head's input in the decoder and t_i the token at position i, depth k = 1, 2, ... computes at position i

    x_k = norm(layer(W [norm_e(E t_{i+k}); norm_h(x_{k-1})])),  logits = x_k H^T: predicts t_{i+k+1}

with the embedding E and the head H of the decoder, and a layer like the decoder's last one. Parameters are named from
0: mtp.0 is depth 1.

Shapes: B batch, s a rank's shard of the sequence between tensor-parallel regions, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.config import DecoderConfig, LayerConfig
from megalaunch.engine.model.decoder_layer import make_block
from megalaunch.engine.model.dropout import LayerDropoutMasks
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import REPLICATED


class MeetInOneNode(torch.autograd.Function):
    """y = x, for several tensors. Backward: dx = dy.

    The embeddings of all depths and the decoder's output meet in one node of the graph. There a zero-bubble schedule
    divides the backward pass into that of the stage's input and that of the embedding's weight. If embeddings joined
    at every depth, the second pass would run through the layers between them again, whose saved tensors are gone.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class MultiTokenDepth(nn.Module):
    """One depth of multi-token prediction, without the embedding and the head, which are the decoder's."""

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
        width = config.hidden_size
        self.embedding_norm = Norm(width, config.norm)
        self.hidden_norm = Norm(width, config.norm)
        self.projection = Linear(2 * width, width, REPLICATED)
        self.layer = make_block(config, layer, modules, tp_region, dispatcher, balancing)
        self.norm = Norm(width, config.norm)

    def forward(
        self,
        embedded_BsH: Tensor,
        x_BsH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        dropout_masks: LayerDropoutMasks,
    ) -> Tensor:
        """Return the head's input of this depth, [B, s, H].

        Args:
            embedded_BsH: Embeddings of the tokens that are this depth's number of positions further.
            x_BsH: The head's input of the depth before, or of the decoder.
            rotation: As of the decoder's last layer.
            attend: As of the decoder's last layer.
            dropout_masks: The dropout of this depth's layer.
        """
        joined = torch.cat((self.embedding_norm(embedded_BsH), self.hidden_norm(x_BsH)), dim=-1)
        x_BsH = self.projection(joined).to(embedded_BsH.dtype)  # fp32 where the residual stream is
        return self.norm(self.layer(x_BsH, rotation, attend, None, dropout_masks))
