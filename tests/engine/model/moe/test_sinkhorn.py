"""Sinkhorn's iteration: against Megatron-LM's where that ends, and where it does not."""

from __future__ import annotations

import pytest
import torch

from megalaunch.engine.model.config import MLPConfig, MoEConfig
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.moe.sinkhorn import sinkhorn

TOKENS, EXPERTS = 256, 8


def logits_of(std: float) -> torch.Tensor:
    """Logits of which one expert is preferred by all tokens."""
    drawn = std * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    return drawn + std * torch.arange(EXPERTS) / EXPERTS


@pytest.mark.parametrize("std", [0.1, 1.0])
def test_it_equals_megatron(std):
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    ours, theirs = sinkhorn(logits_of(std)), moe_utils.sinkhorn(logits_of(std))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-7)
    assert torch.equal(ours.topk(2).indices, theirs.topk(2).indices)


@pytest.mark.parametrize("std", [3.0, 30.0])
def test_large_logits_end_and_stay_finite(std):
    assignment = sinkhorn(logits_of(std))
    assert assignment.isfinite().all()
    best = assignment.argmax(1).bincount(minlength=EXPERTS)
    before = logits_of(std).argmax(1).bincount(minlength=EXPERTS)
    assert best.max() < before.max()


def test_the_load_is_even():
    assignment = sinkhorn(logits_of(1.0))
    torch.testing.assert_close(assignment.sum(0), torch.full((EXPERTS,), 1 / EXPERTS), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("top_k", "score"), [(1, "sigmoid"), (2, "softmax")])
def test_training_is_balanced_and_evaluation_chooses_by_scores(top_k, score):
    mlp = MLPConfig(width=8)
    config = MoEConfig(num_experts=EXPERTS, top_k=top_k, expert=mlp, score=score, normalize_top_k=False)
    torch.manual_seed(0)
    x = torch.randn(TOKENS, 16) + 1
    routers = [Router(16, config), Router(16, MoEConfig(**{**vars(config), "choice": "sinkhorn"}))]
    for router in routers:
        router.weight.data = torch.randn(EXPERTS, 16, generator=torch.Generator().manual_seed(1)) / 4
    plain, balanced = (router(x, 1) for router in routers)
    load = [routing.expert_ids_Tk.flatten().bincount(minlength=EXPERTS) for routing in (plain, balanced)]
    assert load[1].max() < 0.8 * load[0].max()
    logits = x @ routers[1].weight.T
    weights = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    torch.testing.assert_close(balanced.weights_Tk, weights.gather(1, balanced.expert_ids_Tk))
    with torch.no_grad():
        assert torch.equal(routers[1](x, 1).expert_ids_Tk, plain.expert_ids_Tk)
