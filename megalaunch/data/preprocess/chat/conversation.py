"""Conversations and their record formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.records import parse_json_line
from megalaunch.data.remote_file import InputPath

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
KEYS = ("messages", "conversations", "prompt", "completion", "tools")  # keys of a record
_SHAPES = (
    '{"messages": [{"role": ..., "content": ...}]}, {"conversations": [{"from": ..., "value": ...}]} '
    'or {"prompt": ..., "completion": ...}'
)
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        text: the content, including tool calls.
        counted: whether it counts in the loss.
        given: the message as passed to a tokenizer's own template.
    """

    role: str
    text: str
    counted: bool
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the tools offered to the model."""

    messages: tuple[Message, ...]
    tools: Any = None


def parse_conversation(line: bytes, path: InputPath, number: int) -> Conversation:
    """Parse a conversation from a jsonl line; DataError with file, line and cause."""
    record = parse_json_line(line.rstrip(b"\r\n"), path, number)
    if not isinstance(record, dict):
        raise DataError(f"no object, but {type(record).__name__}", file=path, record=number)
    return conversation(record, path, number)


def conversation(record: Mapping[str, Any], path: InputPath, number: int) -> Conversation:
    """Parse a conversation from a record; DataError with file, record and cause."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        turns: Sequence[Any] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return _conversation(turns, "role", "content", record, path, number)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], "role", "content", record, path, number)
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = record.get(key) or ()
        if isinstance(turns, list) and turns:
            keys = (role_key, text_key)
            if key == "conversations" and isinstance(turns[0], dict) and "role" in turns[0]:
                keys = ("role", "content")
            return _conversation(turns, *keys, record, path, number)
    raise DataError(f"no conversation: a line is {_SHAPES}", file=path, record=number)


def drop_nulls(value: Any) -> Any:
    """Remove null keys, except `content`, from a table's value: in a table every struct has every key."""
    if isinstance(value, dict):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return [drop_nulls(one) for one in value] if isinstance(value, list) else value


def _conversation(
    turns: Sequence[Any], role_key: str, text_key: str, record: Mapping[str, Any], path: InputPath, number: int
) -> Conversation:
    messages = tuple(_message(turn, role_key, text_key, path, number) for turn in turns)
    tools = record.get("tools")
    if isinstance(tools, str):  # some datasets have them as JSON text
        try:
            tools = json.loads(tools)
        except ValueError:
            raise DataError('"tools" holds no JSON', file=path, record=number) from None
    return Conversation(messages, tools or None)


def _message(turn: Any, role_key: str, text_key: str, path: InputPath, number: int) -> Message:
    """Parse one turn into a message; a weight of 0 excludes it from the loss."""

    def wrong(cause: str, fix: str = "") -> DataError:
        return DataError(cause, file=path, record=number, fix=fix)

    missing = f'a turn without text under "{role_key}" and "{text_key}"'
    if not isinstance(turn, dict) or not isinstance(turn.get(role_key), str):
        raise wrong(missing)
    role, content, calls = turn[role_key], turn.get(text_key), turn.get("tool_calls")
    if role not in _ROLES:
        raise wrong(f"unknown role {role!r} (known: {', '.join(_ROLES)})")
    if isinstance(content, list):
        content = "".join(_part(part, wrong) for part in content)
    if content is not None and not isinstance(content, str):
        raise wrong(missing)
    if content is None and not calls:
        raise wrong(missing)
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        fix = "A message is trained on (1) or not (0), as in OpenAI's fine-tuning files."
        raise wrong(f"the weight {weight!r} of a message is neither 0 nor 1", fix)
    text = "\n".join([*([content] if content else []), *map(_tool_call, calls or ())])
    left_out = {role_key, text_key, "weight"}
    others = {key: value for key, value in turn.items() if key not in left_out}
    given = {"role": _ROLES[role], "content": content, **others}
    return Message(_ROLES[role], text, _ROLES[role] == "assistant" and bool(weight), given)


def _part(part: Any, wrong: Any) -> str:
    """Return the text of one part of a message's content list."""
    if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise wrong(f"a part of the kind {kind!r} in a message: only text is trained on", "Leave such messages out.")


def _tool_call(call: Any) -> str:
    """Format a tool call as Hermes and Qwen do; a tokenizer's own template formats its own."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if isinstance(function, dict):
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # OpenAI's format has them as JSON text
            with suppress(ValueError):
                arguments = json.loads(arguments)
        function = {"name": function.get("name"), "arguments": arguments}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
