"""The mixture-of-experts block of a layer: router, dispatcher, routed experts and shared experts.

Shapes: B batch, s a rank's tokens of each sequence, T = B s, H hidden, R rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megalaunch.engine.model.config import MoEConfig
from megalaunch.engine.model.dropout import RouterJitter
from megalaunch.engine.model.layers import SavePolicy, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import Dispatched, TokenDispatcher
from megalaunch.engine.model.moe.experts import Experts
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import REPLICATED


class LibraryExperts(Protocol):
    """A library that computes the projections of routed experts."""

    def __call__(self, experts: Experts, dispatched: Dispatched) -> Tensor:
        """Return the experts' output for each dispatched row, [R, H]; undefined past the last offset."""


class MoELayer(nn.Module):
    """y_t = sum over the experts e of token t of w_te expert_e(x_t), + gate(x_t) shared(x_t).

    A `library` computes the projections of the experts, if there is one.
    """

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
        self.library: LibraryExperts | None = None
        shared = config.shared_experts
        self.shared_experts = None if shared is None else MLP(hidden_size, shared, tp_region)
        self.shared_expert_gate = Linear(hidden_size, 1, REPLICATED) if config.shared_expert_gate else None

    def forward(self, x_BsH: Tensor, jitter: RouterJitter | None = None) -> Tensor:
        """Apply the block, [B, s, H] -> [B, s, H]; `jitter`: noise on the router's input."""
        return self.save_policy(partial(self.feed_forward, jitter=jitter), x_BsH)

    def feed_forward(self, x_BsH: Tensor, jitter: RouterJitter | None) -> Tensor:
        """Apply the block, as a function that the save policy may call again.

        The first half of the shared experts is computed while tokens are on their way to their experts, the second half
        while they return; with several parts the experts of one part are computed while another one is on its way.
        """
        x_TH = x_BsH.flatten(0, 1)
        routing = self.router(x_TH, x_BsH.shape[0], jitter)
        arriving = [self.dispatcher.dispatch(*part) for part in self._split(x_TH, routing)]
        finish_sharing = None if self.shared_experts is None else self._start_sharing(self.shared_experts, x_BsH)
        returning = []
        for exchange in arriving:
            dispatched = exchange.wait()
            returning.append(self.dispatcher.combine(self._apply_experts(dispatched), dispatched))
        shared_BsH = None if finish_sharing is None else finish_sharing()
        outputs = [exchange.wait() for exchange in returning]
        y_BsH = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view_as(x_BsH)
        return y_BsH if shared_BsH is None else y_BsH + shared_BsH

    def _apply_experts(self, dispatched: Dispatched) -> Tensor:
        if self.library is not None:
            return self.library(self.experts, dispatched)
        y_RH: Tensor = self.experts(dispatched.rows_RH, dispatched.offsets_E)
        return y_RH

    def _split(self, x_TH: Tensor, routing: Routing) -> list[tuple[Tensor, Routing]]:
        """Return the parts of the tokens that are exchanged one after another."""
        parts = self.dispatcher.parts
        if parts == 1:
            return [(x_TH, routing)]
        return list(zip(x_TH.tensor_split(parts), routing.split(parts), strict=True))

    def _start_sharing(self, shared_experts: MLP, x_BsH: Tensor) -> Callable[[], Tensor]:
        """Compute the first half of the shared experts; return a function for the rest, [B, s, H].

        Shared experts that are recomputed are computed at once: their save policy encloses both halves.
        """
        if self.shared_save_policy is not save_activations:
            shared_BsH = self.shared_save_policy(self._share, shared_experts, x_BsH)
            return lambda: shared_BsH
        activated = shared_experts.activate(x_BsH)
        return lambda: self._gate(shared_experts.project_down(activated), x_BsH)

    def _share(self, shared_experts: MLP, x_BsH: Tensor) -> Tensor:
        """Apply the shared experts and their gate, as a function that the save policy may call again."""
        return self._gate(shared_experts(x_BsH), x_BsH)

    def _gate(self, shared_BsH: Tensor, x_BsH: Tensor) -> Tensor:
        """Multiply the shared experts' output by their gate, if they have one."""
        if self.shared_expert_gate is None:
            return shared_BsH
        return shared_BsH * self.shared_expert_gate(x_BsH).sigmoid()
