"""The mixture-of-experts block of a layer: router, dispatcher, routed experts and shared experts.

Shapes: B batch, s a rank's tokens of each sequence, T = B s, H hidden, R rows of this rank's experts.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalaunch.engine.model.config import MoEConfig
from megalaunch.engine.model.dropout import RouterJitter
from megalaunch.engine.model.layers import SavePolicy, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.moe.experts import Experts
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import REPLICATED


class MoELayer(nn.Module):
    """y_t = sum over the experts e of token t of w_te expert_e(x_t), + gate(x_t) shared(x_t)."""

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        tp_region: TPRegion,
        dispatcher: TokenDispatcher,
        balancing: Balancing = ONE_RANK,
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.save_policy: SavePolicy = save_activations
        self.shared_save_policy: SavePolicy = save_activations
        self.router = Router(hidden_size, config, balancing)
        self.experts = Experts(config.num_experts, hidden_size, config.expert)
        shared = config.shared_experts
        self.shared_experts = None if shared is None else MLP(hidden_size, shared, tp_region)
        self.shared_expert_gate = Linear(hidden_size, 1, REPLICATED) if config.shared_expert_gate else None

    def forward(self, x_BsH: Tensor, jitter: RouterJitter | None = None) -> Tensor:
        """Apply the block, [B, s, H] -> [B, s, H]; `jitter`: noise on the router's input."""
        return self.save_policy(partial(self.feed_forward, jitter=jitter), x_BsH)

    def feed_forward(self, x_BsH: Tensor, jitter: RouterJitter | None) -> Tensor:
        """Apply the block, as a function that the save policy may call again."""
        x_TH = x_BsH.flatten(0, 1)
        routing = self.router(x_TH, x_BsH.shape[0], jitter)
        dispatched = self.dispatcher.dispatch(x_TH, routing)
        y_RH = self.experts(dispatched.rows_RH, dispatched.offsets_E)
        y_BsH = self.dispatcher.combine(y_RH, dispatched).view_as(x_BsH)
        return y_BsH if self.shared_experts is None else y_BsH + self.share(x_BsH)

    def share(self, x_BsH: Tensor) -> Tensor:
        """Apply the shared experts, [B, s, H] -> [B, s, H], which every token passes."""
        return self.shared_save_policy(self.shared_feed_forward, x_BsH)

    def shared_feed_forward(self, x_BsH: Tensor) -> Tensor:
        """Apply the shared experts and their gate, as a function that the save policy may call again."""
        assert self.shared_experts is not None
        shared_BsH: Tensor = self.shared_experts(x_BsH)
        if self.shared_expert_gate is None:
            return shared_BsH
        return shared_BsH * self.shared_expert_gate(x_BsH).sigmoid()
