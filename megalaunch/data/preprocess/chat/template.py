"""Conversations written down: by templates that are data, or by the one that came with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.data.preprocess.chat.conversation import Conversation
from megalaunch.data.preprocess.chat.jinja_process import Rendering, TemplateProcess


@dataclass(frozen=True)
class ChatTemplate:
    """A conversation is `begin`, then for each message `header`, its text, `stop` and `after`.

    `{role}` in the header is the role. `stop` None stands for the tokenizer's end-of-document token. A model is
    trained on the text and the `stop` of an answer. `marks` must be single tokens. `trims`: texts lose the space
    around them.
    """

    begin: str
    header: str
    stop: str | None
    after: str
    marks: tuple[str, ...]
    trims: bool = False


TEMPLATES: Mapping[str, ChatTemplate] = {
    "chatml": ChatTemplate("", "<|im_start|>{role}\n", "<|im_end|>", "\n", ("<|im_start|>", "<|im_end|>")),
    "llama3": ChatTemplate(
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        trims=True,
    ),
    "zephyr": ChatTemplate("", "<|{role}|>\n", None, "\n", ()),
    "plain": ChatTemplate("", "{role}: ", None, "\n", ()),
}


def render(template: ChatTemplate, talk: Conversation, stop: str) -> Rendering:
    """A conversation under a template of ours; the spans are its answers, `stop` ends a turn."""
    text, spans = template.begin, []
    for message in talk.messages:
        text += template.header.replace("{role}", message.role)
        start = len(text)
        text += (message.text.strip() if template.trims else message.text) + stop
        if message.counted:
            spans.append((start, len(text)))
        text += template.after
    return Rendering(text, tuple(spans))


def render_jinja(
    process: TemplateProcess, talk: Conversation, names: Mapping[str, str], special: Iterable[str]
) -> Rendering:
    """A conversation under a tokenizer's own template; the spans are its answers.

    They are what stands within {% generation %}. Without that an answer is what a conversation up to it has more than
    the prompt for it, which needs a template that writes the beginning of a conversation as the beginning of the whole.
    """
    given = [dict(message.given) for message in talk.messages]

    def asked(count: int, prompt: bool) -> dict[str, Any]:
        tools = {} if talk.tools is None else {"tools": talk.tools}
        return {**names, **tools, "messages": given[:count], "add_generation_prompt": prompt}

    (whole,) = process.render([asked(len(given), False)])
    answers = [number for number, message in enumerate(talk.messages) if message.role == "assistant"]
    if whole.error is not None or not answers:
        return whole
    if whole.spans:
        return _count_messages(whole, talk, answers)
    questions = [asked(number, True) for number in answers] + [asked(number + 1, False) for number in answers]
    parts = process.render(questions)
    if failed := next((part for part in parts if part.error is not None), None):
        return failed
    spans = []
    for before, after in zip(parts[: len(answers)], parts[len(answers) :], strict=True):
        if not (whole.text.startswith(after.text) and after.text.startswith(before.text)):
            return Rendering(
                error="it writes the beginning of a conversation in another way than within the whole, so that its "
                "answers cannot be told; mark them in it by {% generation %} ... {% endgeneration %}"
            )
        spans.append((len(before.text), _end(after.text, len(before.text), special)))
    return _count_messages(Rendering(whole.text, tuple(spans)), talk, answers)


def _end(text: str, start: int, special: Iterable[str]) -> int:
    """Where an answer ends: behind its last special token, where only white space follows that."""
    bare = text.rstrip()
    ends = any(bare.endswith(name) for name in special)
    return len(bare) if ends and len(bare) >= start else len(text)


def _count_messages(rendering: Rendering, talk: Conversation, answers: Sequence[int]) -> Rendering:
    """The spans of those answers that are trained on."""
    if all(talk.messages[number].counted for number in answers):
        return rendering
    if len(rendering.spans) != len(answers):
        return Rendering(error="its {% generation %} parts are not one an answer, so weights cannot be told apart")
    kept = (span for span, number in zip(rendering.spans, answers, strict=True) if talk.messages[number].counted)
    return Rendering(rendering.text, tuple(kept))
