"""Renders conversations to text: by built-in templates (data), or by the Jinja template of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.data.preprocess.chat.conversation import Conversation
from megalaunch.data.preprocess.chat.jinja_process import Rendering, TemplateProcess


@dataclass(frozen=True)
class ChatTemplate:
    """A built-in template: `begin`, then for each message `header`, its text, `stop` and `after`.

    The text and the `stop` of an answer count in the loss.

    Attributes:
        begin: start of a conversation.
        header: start of a message; `{role}` is replaced by the role.
        stop: end of a message; None: the tokenizer's end-of-document token.
        after: separator after a message.
        marks: strings that must be single tokens.
        trims: whether white space around texts is removed.
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
    """Render a conversation with a built-in template; the spans are its answers, `stop` ends each turn."""
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
    """Render a conversation with a tokenizer's own template; the spans are its answers.

    Answers are the parts within {% generation %}. Without these, an answer is the difference between the conversation
    up to and including it and the generation prompt before it; this needs a template that renders the start of a
    conversation as a prefix of the complete one.
    """
    messages = [dict(message.given) for message in talk.messages]

    def variables(count: int, prompt: bool) -> dict[str, Any]:
        tools = {} if talk.tools is None else {"tools": talk.tools}
        return {**names, **tools, "messages": messages[:count], "add_generation_prompt": prompt}

    (rendered,) = process.render([variables(len(messages), False)])
    answers = [number for number, message in enumerate(talk.messages) if message.role == "assistant"]
    if rendered.error is not None or not answers:
        return rendered
    if rendered.spans:
        return _count_messages(rendered, talk, answers)
    prefixes = [variables(number, True) for number in answers] + [variables(number + 1, False) for number in answers]
    parts = process.render(prefixes)
    if failed := next((part for part in parts if part.error is not None), None):
        return failed
    spans = []
    for before, after in zip(parts[: len(answers)], parts[len(answers) :], strict=True):
        if not (rendered.text.startswith(after.text) and after.text.startswith(before.text)):
            return Rendering(
                error="it renders the start of a conversation in another way than in the complete one, so that its "
                "answers cannot be located; mark them in it by {% generation %} ... {% endgeneration %}"
            )
        spans.append((len(before.text), _end(after.text, len(before.text), special)))
    return _count_messages(Rendering(rendered.text, tuple(spans)), talk, answers)


def _end(text: str, start: int, special: Iterable[str]) -> int:
    """Return where an answer ends: after its last special token, if only white space follows."""
    bare = text.rstrip()
    ends = any(bare.endswith(name) for name in special)
    return len(bare) if ends and len(bare) >= start else len(text)


def _count_messages(rendering: Rendering, talk: Conversation, answers: Sequence[int]) -> Rendering:
    """Keep only the spans of answers that count in the loss."""
    if all(talk.messages[number].counted for number in answers):
        return rendering
    if len(rendering.spans) != len(answers):
        return Rendering(error="its {% generation %} parts are not one an answer, so message weights cannot be applied")
    counted = (span for span, number in zip(rendering.spans, answers, strict=True) if talk.messages[number].counted)
    return Rendering(rendering.text, tuple(counted))
