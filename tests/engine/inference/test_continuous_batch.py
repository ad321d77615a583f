"""Continuous batching: what a text is does not depend on when others join its batch, or leave it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_run import make_run

from megalaunch.engine import api
from megalaunch.engine.inference.continuous_batch import ContinuousBatch, PromptScore, SequenceRequest
from megalaunch.engine.inference.penalties import PenaltyState, TokenPenalties
from megalaunch.engine.inference.request import GenerationRequest
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion, TextDelta

SHAPES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "experts": {"moe": {"num_experts": 4, "ffn_hidden_size": 24}},
    "latent": {
        "num_query_groups": 4,
        "head_dim": 12,
        "mla": {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> api.LanguageModel:
    return api.open_model(make_run(tmp_path_factory.mktemp("runs") / "tiny", (10,)).root)


def requests(model, count: int, seed: int = 0) -> list[SequenceRequest]:
    """Prompts of 1 to 20 tokens with 1 to 24 new ones, greedy and sampled, each with a setting of its own."""
    draw = random.Random(seed)
    texts = "the cat sat on the mat, the dog lay by the door; näh, hören wir auf."
    made = []
    for number in range(count):
        prompt = tuple(model.encode(texts)[: draw.randint(1, 20)])
        sampling = Sampling(draw.choice([0.0, 0.7, 1.3]), draw.choice([None, 20]), draw.choice([1.0, 0.9]), number)
        stop = draw.choice([(), ("a",), ("at", "og")])
        made.append(SequenceRequest(prompt, draw.randint(1, 24), sampling, stop=stop, logprobs=2))
    return made


def run_batch(model, asked, most: int, draw: random.Random | None = None) -> dict[int, list]:
    """The events of each text, when at most `most` are in the batch; with `draw` they come at random."""
    batch, waiting, events = ContinuousBatch(model), list(enumerate(asked)), {}
    while waiting or len(batch):
        while waiting and len(batch) < most and (draw is None or not len(batch) or draw.random() < 0.4):
            batch.admit(*waiting.pop(0))
        for event in batch.step():
            events.setdefault(event.row, []).append(event)
    return events


def alone(model, request: SequenceRequest) -> list:
    asked = GenerationRequest(request.max_new_tokens, request.sampling, request.stop, logprobs=request.logprobs)
    return list(api.generate_texts(model, [request.prompt], asked))


def assert_same(found: list, expected: list, number: int) -> None:
    assert [event.text for event in found] == [event.text for event in expected]
    mine, theirs = found[-1], expected[-1]
    assert mine.row == number
    assert (mine.tokens, mine.finish_reason, mine.stop) == (theirs.tokens, theirs.finish_reason, theirs.stop)
    for here, there in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert here.chosen.token == there.chosen.token
        assert here.chosen.logprob == pytest.approx(there.chosen.logprob, abs=2e-5)
        assert [one.id for one in here.top_logprobs] == [one.id for one in there.top_logprobs]


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_what_they_are_alone(tmp_path, shape):
    model = api.open_model(make_run(tmp_path / "run", (10,), **SHAPES[shape]).root)
    asked = requests(model, 24)
    events = run_batch(model, asked, 5, random.Random(1))
    for number, request in enumerate(asked):
        assert_same(events[number], alone(model, request), number)


def test_a_text_that_outgrows_longropes_border_is_what_it_is_alone(tmp_path):
    rope = {"scaling": "longrope", "original_positions": 16, "short_factors": [1.0, 1.1, 1.2, 1.4]}
    longer = {"long_factors": [1.0, 2.0, 4.0, 8.0]}
    model = api.open_model(make_run(tmp_path / "run", (10,), rope=rope | longer).root)
    asked = [replace(request, stop=(), max_new_tokens=24) for request in requests(model, 8, seed=3)]
    assert any(len(request.prompt) < 16 for request in asked)
    events = run_batch(model, asked, 4, random.Random(2))
    for number, request in enumerate(asked):
        assert_same(events[number], alone(model, request), number)


def test_a_text_longer_than_the_spare_room_of_the_cache_goes_on(model):
    request = SequenceRequest(tuple(model.encode("the cat")), 600, Sampling(1.0))
    events = run_batch(model, [request, replace(request, max_new_tokens=3)], 2)
    assert events[0][-1].tokens == alone(model, request)[-1].tokens
    assert len(events[0][-1].tokens) > 256


def test_a_removed_text_leaves_no_trace(model):
    first, second = requests(model, 2, seed=5)
    first, second = (replace(one, max_new_tokens=20, stop=()) for one in (first, second))
    batch = ContinuousBatch(model)
    batch.admit(0, first)
    batch.admit(1, second)
    events = [*batch.step(), *batch.step()]
    batch.remove(0)
    while len(batch):
        events += batch.step()
    assert not any(isinstance(event, Completion) and event.row == 0 for event in events)
    assert_same([event for event in events if event.row == 1], alone(model, second), 1)
    assert list(batch.step()) == []


def test_no_cache_is_left_when_all_texts_have_ended(model):
    batch = ContinuousBatch(model)
    for number, request in enumerate(requests(model, 6)):
        batch.admit(number, request)
    while len(batch):
        list(batch.step())
    list(batch.step())
    assert batch._cache is None
    assert batch._cached == []


def test_a_prompt_is_scored_as_a_whole_pass_scores_it(model):
    prompt = tuple(model.encode("the cat sat on the mat"))
    asked = SequenceRequest(prompt, 0, Sampling(0.0), logprobs=3, score_prompt=True)
    score, completion = run_batch(model, [asked], 1)[0]
    assert isinstance(score, PromptScore)
    assert (completion.tokens, completion.finish_reason) == ((), "length")
    with torch.no_grad():
        logprobs = model.decoder(torch.tensor([prompt]))[0, :, : model.tokenizer.vocab_size].log_softmax(-1)
    for position, one in enumerate(score.logprobs):
        assert one.chosen.id == prompt[position + 1]
        assert one.chosen.logprob == pytest.approx(float(logprobs[position, prompt[position + 1]]), abs=1e-5)
        assert [top.id for top in one.top_logprobs] == logprobs[position].topk(3).indices.tolist()
    assert len(score.logprobs) == len(prompt) - 1


def test_a_prompt_of_one_token_has_no_score(model):
    asked = SequenceRequest((5,), 2, Sampling(0.0), logprobs=0, score_prompt=True)
    score, *_, completion = run_batch(model, [asked], 1)[0]
    assert score == PromptScore(0, ())
    assert len(completion.tokens) <= 2


def test_penalties_and_biases_change_the_logits():
    state = PenaltyState(TokenPenalties(presence=0.5, frequency=0.25, bias={1: 3.0, 2: -1.0}))
    logits = torch.zeros(1, 4)
    for token in (2, 2, 3):
        state.count(token)
    assert state.apply(logits).tolist() == [[0.0, 3.0, -2.0, -0.75]]
    assert logits.tolist() == [[0.0] * 4]
    assert PenaltyState(TokenPenalties()).apply(logits) is logits


def test_a_frequency_penalty_forbids_repetition_and_a_bias_a_token(model):
    prompt = tuple(model.encode("the cat"))
    plain = SequenceRequest(prompt, 30, Sampling(0.0))
    events = run_batch(
        model,
        [
            plain,
            replace(plain, penalties=TokenPenalties(frequency=100.0)),
            replace(plain, penalties=_banning(model, plain)),
        ],
        3,
    )
    written, varied, without = (events[number][-1].tokens for number in range(3))
    assert len(set(varied)) == len(varied)
    assert len(set(written)) < len(written)
    assert written[0] not in without
    assert all(isinstance(event, TextDelta | Completion) for event in events[0])


def _banning(model, request: SequenceRequest) -> TokenPenalties:
    return TokenPenalties(bias={alone(model, request)[-1].tokens[0]: -100.0})
