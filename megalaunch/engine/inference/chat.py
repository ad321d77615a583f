"""What stands beside weights and says how they are to be asked: ends of a text, and the chat template.

A template is a program that came with the weights: it runs in Jinja's sandbox, sees the messages and nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalaunch.data.tokenizer import Tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MAX_BYTES = 1_000_000  # of a template; of its neighbours a hundred times that


def chat_text(files: Mapping[str, Path], messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt of a conversation, up to where the answer begins, by the template among `files`.

    Raises ValueError when there is none, or when it fails or refuses the messages.
    """
    template = _template(files)
    if template is None:
        raise ValueError(
            "this model came without a chat template (chat_template in tokenizer_config.json, or chat_template.jinja); "
            "leave --chat out and write the prompt as the model was trained on it"
        )
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _as_json
    sandbox.globals |= {"raise_exception": _refused, "strftime_now": _now}
    named = {name: text for name in _TOKENS if (text := named_token(files, name)) is not None}
    try:
        return sandbox.from_string(template).render(messages=list(messages), add_generation_prompt=True, **named)
    except (TemplateError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the chat template that came with this model cannot be applied: {error}") from error


def ends_of(files: Mapping[str, Path], config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and those that generation_config.json or config.json name."""
    declared = _json(files, "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    found = {one for one in (declared if isinstance(declared, list) else [declared]) if type(one) is int}
    named = tokenizer.token_id(text) if (text := named_token(files, "eos_token")) is not None else None
    return frozenset({*found, *(one for one in (named, tokenizer.eod_id) if one is not None)})


def _template(files: Mapping[str, Path]) -> str | None:
    if "chat_template.jinja" in files:
        return _read(files["chat_template.jinja"], _MAX_BYTES)
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _json(files, name).get("chat_template")
        if isinstance(found, list):  # several by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def named_token(files: Mapping[str, Path], name: str) -> str | None:
    """The token that tokenizer_config.json names as `bos_token`, `eos_token`, ...; raises CheckpointError."""
    found = _json(files, "tokenizer_config.json").get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(_read(files[name], 100 * _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{files[name]} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{files[name]} holds no object")
    return data


def _read(path: Path, most: int) -> str:
    try:
        if path.stat().st_size > most:
            raise CheckpointError(f"{path} is too big to be what its name says")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _as_json(value: object, indent: int | None = None) -> str:
    """As in transformers: characters stay as they are, and nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refused(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
