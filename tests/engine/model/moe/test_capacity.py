"""Experts with a capacity against plain loops: which tokens are dropped, outputs and gradients, padded or not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megalaunch.engine.model.config import MLPConfig, MoEConfig
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.capacity import exceeds_capacity, expert_capacity, limit_to_capacity
from megalaunch.engine.model.moe.dispatcher import LocalDispatcher
from megalaunch.engine.model.moe.load import ExpertStats
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.model.tp_region import NO_TP

EXPERTS, TOP_K, SEQUENCES, LENGTH, HIDDEN = 4, 2, 2, 6, 8
CONFIG = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert=MLPConfig(width=8), capacity_factor=0.75)


def routing_of(tokens: int) -> Routing:
    draw = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP_K).indices
    weights = torch.randint(1, 5, (tokens, TOP_K), generator=draw) / 4  # with ties
    return Routing(ids, weights)


def dropped_by_loops(routing: Routing, policy: str, capacity: int) -> torch.Tensor:
    """Of tokens of SEQUENCES sequences, one after the other: the first at each position come first."""
    order = sorted(range(SEQUENCES * LENGTH), key=lambda token: (token % LENGTH, token // LENGTH))
    dropped = torch.zeros(SEQUENCES * LENGTH, TOP_K, dtype=torch.bool)
    for expert in range(EXPERTS):
        pairs = [(token, j) for token in order for j in range(TOP_K) if routing.expert_ids_Tk[token, j] == expert]
        if policy == "probs":
            pairs.sort(key=lambda pair: -routing.weights_Tk[pair])  # stable
        for pair in pairs[capacity:]:
            dropped[pair] = True
    return dropped


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_full_expert_drops_by_the_policy(policy):
    config = replace(CONFIG, drop_policy=policy, pad_to_capacity=True)
    routing = routing_of(SEQUENCES * LENGTH)
    found = limit_to_capacity(config, ONE_RANK, routing, SEQUENCES)
    expected = dropped_by_loops(routing, policy, 5)  # 0.75 x 2 x 12 / 4, rounded up
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(found.expert_ids_Tk, routing.expert_ids_Tk.masked_fill(expected, EXPERTS))
    assert torch.equal(found.weights_Tk, routing.weights_Tk.masked_fill(expected, 0))
    assert found.count_dropped(EXPERTS) == expected.sum()
    assert found.padded_rows == 5


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_ranks_that_share_sequences_drop_the_same_tokens(policy):
    """Two ranks: one has the first and last positions of each sequence, as under context parallelism."""
    config = replace(CONFIG, drop_policy=policy)
    routing = routing_of(SEQUENCES * LENGTH)
    whole = limit_to_capacity(config, ONE_RANK, routing, SEQUENCES)
    positions = torch.tensor([[0, 1, 5], [2, 3, 4]])
    parts = [(torch.arange(SEQUENCES)[:, None] * LENGTH + own).flatten() for own in positions]
    for rank, part in enumerate(parts):
        order = torch.cat([(own * SEQUENCES + torch.arange(SEQUENCES)[:, None]).flatten() for own in positions])
        values = {torch.int64: routing.expert_ids_Tk, torch.float32: routing.weights_Tk}

        def gather(mine, order=order, values=values):
            return order if mine.ndim == 1 else values[mine.dtype][torch.cat(parts)]

        balancing = Balancing(1, 2, rank, gather_tokens=gather, position_ids=lambda *_, own=positions[rank]: own)
        mine = Routing(routing.expert_ids_Tk[part], routing.weights_Tk[part])
        found = limit_to_capacity(config, balancing, mine, SEQUENCES)
        assert torch.equal(found.expert_ids_Tk, whole.expert_ids_Tk[part])


def test_capacity_is_rounded_up_and_never_0():
    assert expert_capacity(CONFIG, 1.0, 12) == 6
    assert expert_capacity(CONFIG, 1.0, 1) == 1
    assert expert_capacity(CONFIG, 1.1, 12) == 7
    assert exceeds_capacity(torch.tensor([1, 1, 0, 1]), None, 2).tolist() == [False, False, False, True]


@pytest.mark.parametrize("pad", [False, True])
def test_outputs_and_gradients_are_those_of_experts_in_a_loop(pad):
    torch.manual_seed(1)
    layer = MoELayer(HIDDEN, replace(CONFIG, pad_to_capacity=pad), NO_TP, LocalDispatcher(EXPERTS))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x, upstream = torch.randn(SEQUENCES, LENGTH, HIDDEN), torch.randn(SEQUENCES, LENGTH, HIDDEN)

    def plain(x_BsH):
        x_TH = x_BsH.flatten(0, 1)
        weights, ids = (x_TH @ layer.router.weight.T).softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        dropped = dropped_by_loops(Routing(ids, weights.detach()), "probs", 5)
        assert dropped.any()
        weights, experts, total = weights.masked_fill(dropped, 0), layer.experts, 0
        for e in range(EXPERTS):
            width = F.silu(x_TH @ experts.gate_proj.weight[e].T) * (x_TH @ experts.up_proj.weight[e].T)
            total = total + (weights * (ids == e)).sum(1, keepdim=True) * (width @ experts.down_proj.weight[e].T)
        return total.view_as(x_BsH)

    def run(block):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = block(leaf)
        out.backward(upstream)
        return [out.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    for found, expected in zip(run(layer), run(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    sums = layer.router.load.take(x.device)
    (share,) = ExpertStats.from_sums(sums[None], TOP_K).dropped
    assert share == sums[2 * EXPERTS + 1] / (SEQUENCES * LENGTH * TOP_K) > 0


def test_evaluation_drops_nothing():
    layer = MoELayer(HIDDEN, replace(CONFIG, capacity_factor=0.1), NO_TP, LocalDispatcher(EXPERTS))
    with torch.no_grad():
        assert not layer.router(torch.randn(12, HIDDEN), SEQUENCES).drops
