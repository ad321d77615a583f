"""Losses of routers against loops over tokens and transformers' own, and what they add to gradients."""

import math
from dataclasses import replace

import pytest
import torch

from megalaunch.engine.model.config import MLPConfig, MoEConfig
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing, attach_loss, count_tokens, router_losses
from megalaunch.engine.model.moe.load import ExpertStats
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.moe.routing import (
    expert_weights,
    mask_other_groups,
    router_probability,
    score_experts,
    top_k_stable,
)

EXPERTS, TOP_K, SEQUENCES, LENGTH = 5, 2, 3, 4
CONFIG = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert=MLPConfig(width=8), balance_loss_coeff=0.3)

SCORES = {  # softmax: before the division by the sum
    "softmax": math.exp,
    "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
    "sqrtsoftplus": lambda v: math.sqrt(math.log(1 + math.exp(v))),
}


@pytest.fixture
def logits():
    return torch.randn(SEQUENCES * LENGTH, EXPERTS, generator=torch.Generator().manual_seed(0))


def losses_of(config, logits, balancing=ONE_RANK):
    scores = score_experts(logits, config.score)
    counts = count_tokens(top_k_stable(scores, TOP_K), EXPERTS, SEQUENCES)
    return router_losses(config, balancing, logits, scores, counts)


def balance_by_loops(rows, score):
    """The balance loss of these rows of logits, with a coefficient of 1."""
    counts, sums = [0] * EXPERTS, [0.0] * EXPERTS
    for row in rows.tolist():
        values = [SCORES[score](v) for v in row]
        for expert in sorted(range(EXPERTS), key=lambda e: -values[e])[:TOP_K]:
            counts[expert] += 1
        for expert in range(EXPERTS):
            sums[expert] += values[expert] / sum(values)
    return EXPERTS / (TOP_K * len(rows) ** 2) * sum(c * s for c, s in zip(counts, sums, strict=True))


@pytest.mark.parametrize("score", SCORES)
def test_balance_loss_of_a_microbatch_and_of_sequences(logits, score):
    config = replace(CONFIG, score=score, balance_loss="batch")
    assert losses_of(config, logits).balance.item() == pytest.approx(0.3 * balance_by_loops(logits, score), rel=1e-5)
    config = replace(config, balance_loss="sequence")
    each = [balance_by_loops(rows, score) for rows in logits.split(LENGTH)]
    assert losses_of(config, logits).balance.item() == pytest.approx(0.3 * sum(each) / SEQUENCES, rel=1e-5)


def test_the_global_loss_has_the_load_of_the_step_before(logits):
    config, load_E = replace(CONFIG, balance_loss="global"), torch.tensor([0.5, 0.2, 0.3, 0.0, 0.0])
    counts = count_tokens(top_k_stable(logits, TOP_K), EXPERTS, SEQUENCES)
    found = router_losses(config, ONE_RANK, logits, logits.softmax(-1), counts, load_E).balance.item()
    assert found == pytest.approx(0.3 * EXPERTS * (logits.softmax(-1).mean(0) * load_E).sum().item(), rel=1e-5)
    # With the load of the microbatch itself it is the loss of the microbatch.
    batch = losses_of(replace(CONFIG, balance_loss="batch"), logits).balance.item()
    load_E = counts.sum(0) / counts.sum()
    found = router_losses(config, ONE_RANK, logits, logits.softmax(-1), counts, load_E).balance.item()
    assert found == pytest.approx(batch, rel=1e-5)


def test_an_even_load_has_a_balance_loss_of_the_coefficient():
    even = torch.zeros(EXPERTS, EXPERTS)
    counts = torch.full((1, EXPERTS), float(TOP_K))
    found = router_losses(replace(CONFIG, balance_loss="batch"), ONE_RANK, even, even.softmax(-1), counts)
    assert found.balance.item() == pytest.approx(0.3)


def test_the_balance_loss_is_that_of_transformers(logits):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    theirs = mixtral.load_balancing_loss_func((logits,), EXPERTS, TOP_K).item()  # not divided by k
    ours = losses_of(replace(CONFIG, balance_loss="batch", balance_loss_coeff=1.0), logits).balance.item()
    assert ours == pytest.approx(theirs / TOP_K, rel=1e-5)


def test_z_loss_is_the_mean_squared_log_sum_exp(logits):
    found = losses_of(replace(CONFIG, z_loss_coeff=0.5), logits)
    each = [math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()]
    assert found.z.item() == pytest.approx(0.5 * sum(each) / len(each), rel=1e-5)
    assert found.balance == 0
    assert not losses_of(CONFIG, logits).attached


def test_parts_of_ranks_add_up_to_the_loss(logits):
    """Two ranks hold half of each sequence; a sum over ranks gives both the counts of all tokens."""
    config = replace(CONFIG, balance_loss="sequence", z_loss_coeff=0.1)
    parts = [half.flatten(0, 1) for half in logits.view(SEQUENCES, LENGTH, EXPERTS).chunk(2, dim=1)]
    counts = sum(count_tokens(top_k_stable(part.softmax(-1), TOP_K), EXPERTS, SEQUENCES) for part in parts)
    found = [losses_of(config, part, Balancing(sum_counts=lambda _: counts)) for part in parts]
    whole = losses_of(config, logits)
    assert sum(part.balance for part in found).item() == pytest.approx(whole.balance.item(), rel=1e-5)
    assert sum(part.z for part in found).item() == pytest.approx(whole.z.item(), rel=1e-5)


def test_an_attached_loss_adds_its_gradient_and_no_value():
    weights, other = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = attach_loss(weights, other.square() * 0.25)
    (out * 5).sum().backward()
    assert torch.equal(out, weights)
    assert weights.grad.tolist() == [5.0] * 3
    assert other.grad.item() == pytest.approx(0.25 * 4)


def test_a_router_records_a_microbatch_once_and_nothing_in_evaluation():
    router = Router(6, replace(CONFIG, balance_loss="batch", z_loss_coeff=0.1), Balancing(microbatches=2))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(SEQUENCES * LENGTH, 6, requires_grad=True)
    with torch.no_grad():
        router(x, SEQUENCES)
    out = torch.utils.checkpoint.checkpoint(lambda t: router(t, SEQUENCES).weights_Tk, x, use_reentrant=False)
    out.sum().backward()
    sums = router.load.take(x.device)
    assert sums[:EXPERTS].sum() == SEQUENCES * LENGTH * TOP_K
    expected = losses_of(router.config, torch.nn.functional.linear(x, router.weight))
    assert sums[-2:].tolist() == pytest.approx([expected.balance.item() / 2, expected.z.item() / 2], rel=1e-5)
    assert not router.load.take(x.device).any()


def test_a_microbatch_adds_its_share_of_the_gradient():
    gradients = []
    for microbatches in (1, 4):
        torch.manual_seed(0)
        router = Router(6, replace(CONFIG, balance_loss="batch"), Balancing(microbatches))
        torch.nn.init.normal_(router.weight)
        (router(torch.randn(SEQUENCES * LENGTH, 6), SEQUENCES).weights_Tk * 0).sum().backward()
        gradients.append(router.weight.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1] * 4, gradients[0])


def test_the_bias_changes_the_choice_and_not_the_weights():
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
    router = Router(4, replace(CONFIG, num_experts=4, score="sigmoid", balance_bias=True))
    router.expert_bias.copy_(torch.tensor([0.0, -1.0, 0.0, 0.25]))
    chosen = router.choose(scores)
    assert chosen.tolist() == [[0, 3]]
    weights = expert_weights(scores, chosen, normalize=True, scaling_factor=2.0)
    assert weights.tolist()[0] == pytest.approx([2 * 0.5 / 0.7, 2 * 0.2 / 0.7])


def test_the_bias_does_not_change_the_balance_loss():
    """The loss is about the scores; the load that the bias is updated by is about the choice."""
    config = replace(CONFIG, score="sigmoid", balance_loss="batch", balance_bias=True)
    router = Router(6, config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(SEQUENCES * LENGTH, 6)
    router(x, SEQUENCES)
    plain = router.load.take(x.device)
    router.expert_bias[0] = 10  # every token's
    router(x, SEQUENCES)
    biased = router.load.take(x.device)
    assert biased[0] == SEQUENCES * LENGTH != plain[0]
    assert biased[-2] == plain[-2] > 0


def test_only_experts_of_the_best_groups_are_chosen():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.45, 0.6, 0.2]])  # groups: 1.0, 0.95, 0.8
    masked = mask_other_groups(scores, 3, 1, 2)
    assert masked.isneginf().tolist() == [[False, False, True, True, True, True]]
    one_each = mask_other_groups(scores, 3, 2, 1)  # by the best expert: 0.9, 0.6
    assert top_k_stable(one_each, 2).tolist() == [[0, 4]]


def test_ties_go_to_the_lower_index():
    assert top_k_stable(torch.ones(2, 40), 3).tolist() == [[0, 1, 2]] * 2


def test_stats_of_a_step():
    sums = torch.tensor([[4.0] * 8 + [6, 0, 0.5, 0.25], [16, 0, 0, 0] * 2 + [2, 4, 1.0, 0.25]], dtype=torch.float64)
    stats = ExpertStats.from_sums(sums, top_k=2)
    assert (stats.balance_loss, stats.z_loss) == (1.5, 0.5)
    assert stats.load_max == [1.0, 4.0]
    assert stats.router_probability == [0.75, 0.25]
    assert stats.dropped == [0.0, 0.25]
    assert stats.load_entropy == pytest.approx([1.0, 0.0])


def test_router_probability_is_the_share_of_the_chosen_experts():
    scores = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]])
    shares = router_probability(scores * 2, torch.tensor([[0, 1], [2, 3]]))
    assert shares.tolist() == pytest.approx([0.8, 0.5])
