"""Conversations to text: what a line of chat jsonl holds, and the templates that write it down.

Templates are data. Those that come with tokenizers are programs (Jinja), and no program is run from a file here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_SHAPES = (
    '{"messages": [{"role": ..., "content": ...}]}, {"conversations": [{"from": ..., "value": ...}]} '
    'or {"prompt": ..., "completion": ...}'
)


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user, assistant or tool."""

    role: str
    text: str


@dataclass(frozen=True)
class ChatTemplate:
    """A conversation is `begin`, then for each message `header`, its text, `stop` and `after`.

    `{role}` in the header is the role. `stop` None stands for the tokenizer's end-of-document token. A model is
    trained on the text and the `stop` of an answer. `marks` must be single tokens.
    """

    begin: str
    header: str
    stop: str | None
    after: str
    marks: tuple[str, ...]


TEMPLATES: Mapping[str, ChatTemplate] = {
    "chatml": ChatTemplate("", "<|im_start|>{role}\n", "<|im_end|>", "\n", ("<|im_start|>", "<|im_end|>")),
    "llama3": ChatTemplate(
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "zephyr": ChatTemplate("", "<|{role}|>\n", None, "\n", ()),
    "plain": ChatTemplate("", "{role}: ", None, "\n", ()),
}


def conversation(line: bytes, path: Path, number: int) -> list[Message]:
    """The messages of one line; DataError naming file, line and what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON: {error}", file=path, record=number) from None
    if not isinstance(record, dict):
        raise DataError(f"no object, but {type(record).__name__}", file=path, record=number)
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return [Message("user", record["prompt"]), Message("assistant", record["completion"])]
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = record.get(key)
        if isinstance(turns, list) and turns:
            return [_message(turn, role_key, text_key, path, number) for turn in turns]
    raise DataError(f"no conversation: a line is {_SHAPES}", file=path, record=number)


def _message(turn: Any, role_key: str, text_key: str, path: Path, number: int) -> Message:
    role, text = (turn.get(role_key), turn.get(text_key)) if isinstance(turn, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(text, str):
        raise DataError(f'a turn without text under "{role_key}" and "{text_key}"', file=path, record=number)
    if role not in _ROLES:
        raise DataError(f"unknown role {role!r} (known: {', '.join(_ROLES)})", file=path, record=number)
    return Message(_ROLES[role], text)


@dataclass(frozen=True)
class Piece:
    """Text that is encoded on its own; None stands for the token that ends a turn.

    `answer`: a model learns to write it. `quoted`: it comes from a message, and must hold no mark of the template,
    which would pass for another turn.
    """

    text: str | None
    answer: bool = False
    quoted: bool = False


def pieces_of(messages: list[Message], template: ChatTemplate) -> list[Piece]:
    """A conversation under a template."""
    pieces = [Piece(template.begin)]
    for message in messages:
        answer = message.role == "assistant"
        pieces.append(Piece(template.header.replace("{role}", message.role)))
        pieces.append(Piece(message.text, answer, quoted=True))
        pieces.append(Piece(None, answer))
        pieces.append(Piece(template.after))
    return [piece for piece in pieces if piece.text != ""]
