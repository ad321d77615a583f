"""The chat template and the end-of-text tokens of a model, from the files that come with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chat.jinja_process import TemplateProcess
from megalaunch.data.tokenizer.folder import chat_template, named_tokens, read_json
from megalaunch.data.tokenizer.folder import named_token as token_named
from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError

NO_CHAT_TEMPLATE = (
    "this model came without a chat template (chat_template in tokenizer_config.json, or chat_template.jinja)"
)


def chat_text(files: Mapping[str, Path], messages: Sequence[Mapping[str, str]]) -> str:
    """Render a conversation with the chat template among `files`, up to the start of the answer."""
    return chat_texts(files, [messages])[0]


def chat_texts(files: Mapping[str, Path], conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Render conversations with the chat template among `files`, each up to the start of the answer.

    Raises:
        ValueError: There is no template, or it fails, does not terminate or refuses the messages.
        CheckpointError: A file cannot be read.
    """
    template = find_chat_template(files)
    if template is None:
        raise ValueError(f"{NO_CHAT_TEMPLATE}; leave --chat out and write the prompt as the model was trained on it")
    with template:
        return template.render(conversations)


def find_chat_template(files: Mapping[str, Path]) -> ChatTemplate | None:
    """Return the chat template among `files`; None without one. Raises CheckpointError: a file cannot be read."""
    try:
        template, named = chat_template(files), named_tokens(files)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return None if template is None else ChatTemplate(template, named)


class ChatTemplate:
    """Renders conversations with a chat template, in a process of its own that lasts until `close`.

    Args:
        template: The template: a Jinja program.
        named: The special tokens by their names, which the template may use.
    """

    def __init__(self, template: str, named: Mapping[str, Any]) -> None:
        self._process, self._named = TemplateProcess(template, clock=True), named

    def render(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        """Render conversations, each up to the start of the answer. Raises ValueError if the template fails."""
        given = [{**self._named, "messages": [*one], "add_generation_prompt": True} for one in conversations]
        rendered = self._process.render(given)
        for one in rendered:
            if one.error is not None:
                raise ValueError(f"the chat template that came with this model cannot be applied: {one.error}")
        return [one.text for one in rendered]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def stop_token_ids(files: Mapping[str, Path], config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and those of generation_config.json or config.json."""
    declared = _json(files, "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    found = {one for one in (declared if isinstance(declared, list) else [declared]) if type(one) is int}
    named = tokenizer.token_id(text) if (text := named_token(files, "eos_token")) is not None else None
    return frozenset({*found, *(one for one in (named, tokenizer.eod_id) if one is not None)})


def named_token(files: Mapping[str, Path], name: str) -> str | None:
    """Return the token that tokenizer_config.json names as `bos_token`, `eos_token`, ... Raises CheckpointError."""
    try:
        return token_named(files, name)
    except DataError as error:
        raise CheckpointError(str(error)) from error


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    try:
        return read_json(files, name)
    except DataError as error:
        raise CheckpointError(str(error)) from error
