"""Read prompts from the command line, from a file, or from standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chat.conversation import Message, parse_conversation

Prompt = str | list[dict[str, str]]
"""A text, or the messages of a conversation."""


class PromptError(Exception):
    """There are no prompts, or one cannot be parsed; the message names its position."""


def read_prompts(given: Sequence[str], file: str | None, chat: bool, system: str | None) -> list[Prompt]:
    """Return all prompts: `given` first, then one per line of `file` (`-`: standard input). Raises PromptError.

    Lines of a .jsonl file are {"prompt": TEXT}, or with `chat` {"messages": [...]} as well. With `chat` a text is the
    user's message, after the `system` message if there is one.
    """
    found: list[Prompt] = list(given)
    if file is not None:
        found += _read_file(file, chat)
    if not found:
        where = f"{'standard input' if file == '-' else file} has no lines" if file else "there is no prompt"
        raise PromptError(f"{where}: give --prompt TEXT (may be repeated) or --prompts FILE")
    return [_conversation(prompt, system) for prompt in found] if chat else found


def _conversation(prompt: Prompt, system: str | None) -> Prompt:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _read_file(name: str, chat: bool) -> Iterator[Prompt]:
    path = Path(name).expanduser()
    try:
        content = sys.stdin.buffer.read() if name == "-" else path.read_bytes()
        lines = content.decode().split("\n")
    except OSError as error:
        raise PromptError(f"cannot read the prompts in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompts in {path} are not UTF-8: byte {error.start} is invalid") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _read_json(path, number, line, chat) if path.suffix == ".jsonl" else line.removesuffix("\r")


def _read_json(path: Path, number: int, line: str, chat: bool) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path}, line {number} is not valid JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return str(record["prompt"])
    if not chat:
        more = "; conversations need --chat" if isinstance(record, dict) and "messages" in record else ""
        raise PromptError(f'{path}, line {number} has no text under "prompt"{more}')
    try:
        return [_message(message) for message in parse_conversation(line.encode(), path, number).messages]
    except DataError as error:
        raise PromptError(str(error)) from error


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.text}
