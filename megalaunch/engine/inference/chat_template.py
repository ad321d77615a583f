"""What stands beside weights and says how they are to be asked: ends of a text, and the chat template."""

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


def chat_text(files: Mapping[str, Path], messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt of a conversation, up to where the answer begins, by the template among `files`."""
    return chat_texts(files, [messages])[0]


def chat_texts(files: Mapping[str, Path], conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """The prompt of each conversation, up to where the answer begins, by the template among `files`.

    Raises ValueError when there is none, or when it fails, does not end or refuses the messages.
    """
    try:
        template, named = chat_template(files), named_tokens(files)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if template is None:
        raise ValueError(
            "this model came without a chat template (chat_template in tokenizer_config.json, or chat_template.jinja); "
            "leave --chat out and write the prompt as the model was trained on it"
        )
    with TemplateProcess(template, clock=True) as process:
        given = ({**named, "messages": [*messages], "add_generation_prompt": True} for messages in conversations)
        rendered = process.render([*given])
    for one in rendered:
        if one.error is not None:
            raise ValueError(f"the chat template that came with this model cannot be applied: {one.error}")
    return [one.text for one in rendered]


def stop_token_ids(files: Mapping[str, Path], config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and those that generation_config.json or config.json name."""
    declared = _json(files, "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    found = {one for one in (declared if isinstance(declared, list) else [declared]) if type(one) is int}
    named = tokenizer.token_id(text) if (text := named_token(files, "eos_token")) is not None else None
    return frozenset({*found, *(one for one in (named, tokenizer.eod_id) if one is not None)})


def named_token(files: Mapping[str, Path], name: str) -> str | None:
    """The token that tokenizer_config.json names as `bos_token`, `eos_token`, ...; raises CheckpointError."""
    try:
        return token_named(files, name)
    except DataError as error:
        raise CheckpointError(str(error)) from error


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    try:
        return read_json(files, name)
    except DataError as error:
        raise CheckpointError(str(error)) from error
