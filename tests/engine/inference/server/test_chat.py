"""The server's chat completions: conversations go through the model's template."""

from __future__ import annotations

import json

import pytest
from model_server import Client, running_server
from tiny_run import make_run

from megalaunch.engine import api
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion

TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> api.LanguageModel:
    """A Hugging Face folder, which has a chat template beside its weights."""
    folder = tmp_path_factory.mktemp("chat")
    run = make_run(folder / "run", (10,), max_position_embeddings=128)
    api.export_huggingface(run.root, folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return api.open_model(folder / "hf")


@pytest.fixture(scope="module")
def client(model):
    with running_server(model) as client:
        yield client


def expected(model, text: str, count: int, **settings) -> Completion:
    request = api.GenerationRequest(count, Sampling(0.0), **settings)
    *_, last = api.generate_texts(model, [model.tokenizer.encode(text)], request)
    return last


def test_a_conversation_is_answered(model, client: Client):
    rendered = "system: be kind\nuser: the cat\nassistant:"
    answer = client.post("chat/completions", messages=MESSAGES, max_tokens=9, temperature=0).json
    [choice] = answer["choices"]
    one = expected(model, rendered, 9)
    assert choice["message"] == {"role": "assistant", "content": one.text, "refusal": None}
    assert choice["finish_reason"] == {"end": "stop"}.get(one.finish_reason, one.finish_reason)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(rendered))
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    other = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    asked = {"messages": other, "max_completion_tokens": 9, "temperature": 0}
    assert client.post("chat/completions", **asked).json["choices"] == answer["choices"]


def test_an_answer_may_fill_the_context(model, client: Client):
    asked = {"messages": [{"role": "user", "content": "the"}], "seed": 3}
    usage = client.post("chat/completions", **asked).json["usage"]
    assert usage["total_tokens"] <= 128
    assert usage["completion_tokens"] > 16


def test_log_probabilities_are_those_of_the_texts_tokens(model, client: Client):
    asked = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = client.post("chat/completions", **asked).json["choices"][0]["logprobs"]["content"]
    one = expected(model, "system: be kind\nuser: the cat\nassistant:", 4, logprobs=2)
    assert [entry["token"] for entry in content] == [token.chosen.token for token in one.logprobs]
    assert [entry["logprob"] for entry in content] == pytest.approx([t.chosen.logprob for t in one.logprobs], abs=1e-5)
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        whole = "\ufffd" not in entry["token"]
        assert entry["bytes"] == (list(entry["token"].encode()) if whole else None)
    without = client.post("chat/completions", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True).json
    assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_stream_starts_with_the_role(client: Client):
    asked = {"messages": MESSAGES, "max_tokens": 8, "seed": 3, "n": 2}
    whole = client.post("chat/completions", **asked).json["choices"]
    *chunks, done = client.post("chat/completions", stream=True, **asked).events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "must be a list of messages, each with role and content"),
        ({"messages": "hi"}, "messages", "must be a list of messages, each with role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be one of developer, system, "),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string, or a list of parts of type text"),
        (
            {"messages": [MESSAGES[0], {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content",
            "must be a string, or a list of parts of type text",
        ),
        (
            {"messages": [{"role": "user", "content": "no"}]},
            "messages",
            "the chat template that came with this model cannot be applied: not that",
        ),
        ({"messages": MESSAGES, "tools": [{}]}, "tools", "this server calls no tools; leave it out"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "this server calls no tools; leave it out"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_object"}},
            "response_format",
            "only text is generated; leave it out",
        ),
        ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities", "only text is generated; leave it out"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "must be an integer of at least 1, not 0"),
        ({"messages": MESSAGES, "max_completion_tokens": 500}, "max_completion_tokens", "the prompt of "),
        ({"messages": MESSAGES, "prompt": "x"}, "prompt", "unknown field"),
    ],
)
def test_a_field_that_cannot_be_taken_is_named(client: Client, fields, param, message):
    answer = client.post("chat/completions", **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert answer.json["error"]["message"].startswith(message)


def test_fields_that_change_nothing_here_are_taken(client: Client):
    fields = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert client.post("chat/completions", messages=MESSAGES, max_tokens=1, **fields).status == 200


def test_a_model_without_a_template_says_what_to_use(tmp_path):
    model = api.open_model(make_run(tmp_path / "run", (10,)).root)
    with running_server(model) as client:
        error = client.post("chat/completions", messages=MESSAGES).json["error"]
    assert error["message"].startswith("this model came without a chat template")
    assert error["message"].endswith("use /v1/completions, with the prompt as the model was trained on it")
