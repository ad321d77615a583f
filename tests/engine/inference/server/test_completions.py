"""The server's completions: the texts that the engine generates, in the form that OpenAI's clients read."""

from __future__ import annotations

import threading
import time

import pytest
from model_server import Client, running_server
from tiny_run import make_run

from megalaunch.engine import api
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> api.LanguageModel:
    return api.open_model(make_run(tmp_path_factory.mktemp("runs") / "tiny", (10,)).root)


@pytest.fixture(scope="module")
def client(model):
    with running_server(model) as client:
        yield client


def generated(model, prompt: str, count: int, sampling: Sampling, **settings) -> list[Completion]:
    request = api.GenerationRequest(count, sampling, **settings)
    events = api.generate_texts(model, api.tokenize_prompts(model, [prompt]), request)
    return [event for event in events if isinstance(event, Completion)]


def test_texts_are_those_of_generate(model, client: Client):
    asked = {"prompt": "the cat", "max_tokens": 12, "seed": 7, "n": 2, "temperature": 0.9, "top_p": 0.95}
    answer = client.post("completions", model="tiny", top_k=40, min_p=0.01, repetition_penalty=1.1, **asked).json
    sampling = Sampling(0.9, 40, 0.95, 7, 0.01, 1.1)
    expected = generated(model, "the cat", 12, sampling, num_samples=2)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    new = sum(len(one.tokens) for one in expected)
    size = len(model.encode("the cat"))
    assert answer["usage"] == {"prompt_tokens": size, "completion_tokens": new, "total_tokens": size + new}
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_a_request_without_a_seed_draws_its_own(client: Client):
    texts = {client.post("completions", prompt="the", max_tokens=12).json["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


def test_sixteen_tokens_are_the_default(client: Client):
    [choice] = client.post("completions", prompt="the", temperature=0).json["choices"]
    assert choice["finish_reason"] in ("length", "stop")
    usage = client.post("completions", prompt="the", temperature=0).json["usage"]
    assert usage["completion_tokens"] <= 16


@pytest.mark.parametrize("prompt", [["the cat", "a dog"], [[5, 6, 7], [90, 4]], [5, 6, 7], "the cat"])
def test_prompts_are_texts_or_tokens_one_or_many(client: Client, prompt):
    answer = client.post("completions", prompt=prompt, max_tokens=3, n=2, seed=1).json
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(many)))
    alone = [client.post("completions", prompt=one, max_tokens=3, n=2, seed=1).json["choices"] for one in many]
    assert [one["text"] for one in answer["choices"]] == [one["text"] for choices in alone for one in choices]


def test_stop_strings_end_a_text_before_them(model, client: Client):
    [whole] = generated(model, "the cat", 20, Sampling(0.0))
    stop = whole.text[4:6]
    [choice] = client.post("completions", prompt="the cat", max_tokens=20, temperature=0, stop=stop).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole.text[: whole.text.index(stop)]
    assert client.post("completions", prompt="the cat", max_tokens=20, temperature=0, stop=None).status == 200


def test_log_probabilities_have_an_entry_for_every_token(model, client: Client):
    asked = {"prompt": "the cat sat", "max_tokens": 4, "temperature": 0, "logprobs": 3}
    [plain] = client.post("completions", **asked).json["choices"]
    [echoed] = client.post("completions", echo=True, **asked).json["choices"]
    [expected] = generated(model, "the cat sat", 4, Sampling(0.0), logprobs=3)
    new, size = len(expected.tokens), len(model.encode("the cat sat"))
    logprobs = [one.chosen.logprob for one in expected.logprobs]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)
    assert echoed["text"] == "the cat sat" + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(plain["logprobs"][name]) == new
        assert len(echoed["logprobs"][name]) == size + new
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["top_logprobs"][0] is None
    assert "".join(echoed["logprobs"]["tokens"][:size]) == "the cat sat"
    assert echoed["logprobs"]["text_offset"][:2] == [0, len(echoed["logprobs"]["tokens"][0])]
    listed = zip(plain["logprobs"]["tokens"], plain["logprobs"]["top_logprobs"], strict=True)
    assert all(token in top for token, top in listed)


def test_an_echoed_prompt_can_be_scored_without_new_tokens(model, client: Client):
    [choice] = client.post("completions", prompt="the cat", max_tokens=0, echo=True, logprobs=0).json["choices"]
    assert choice["text"] == "the cat"
    assert len(choice["logprobs"]["tokens"]) == len(model.encode("the cat"))
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(model.encode("the cat")) - 1)


def test_a_stream_has_the_same_text_in_pieces(client: Client):
    asked = {"prompt": ["the cat", "a dog"], "max_tokens": 8, "seed": 3, "echo": True, "logprobs": 1}
    whole = client.post("completions", **asked).json
    answer = client.post("completions", stream=True, stream_options={"include_usage": True}, **asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "usage" not in client.post("completions", stream=True, **asked).events[0]


def test_requests_at_once_are_what_they_are_alone(client: Client):
    prompts = [f"the cat {'sat ' * number}" for number in range(9)]
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        found[prompt] = client.post("completions", prompt=prompt, max_tokens=10, seed=5).json["choices"][0]["text"]

    for prompt in prompts:
        ask(prompt)
    alone = dict(found)
    found.clear()
    threads = [threading.Thread(target=ask, args=(one,)) for one in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_nobody_waits_for_is_dropped(model, stream):
    with running_server(model, max_num_seqs=1) as client:
        endless = {"prompt": "the", "max_tokens": 100_000, "logit_bias": dict.fromkeys(model.eos_token_ids, -100)}
        waiting = [client.open("completions", stream=stream, **endless) for _ in range(2)]
        assert wait_for(client, {"running": 1, "waiting": 1})
        for connection in waiting:
            connection.close()
        assert wait_for(client, {"running": 0, "waiting": 0})


def wait_for(client: Client, counts: dict[str, int]) -> bool:
    """Wait until the server counts so many texts."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if client.send("GET", "/health").json == {"status": "ok", **counts}:
            return True
        time.sleep(0.02)
    return False
