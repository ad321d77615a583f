"""Files in a tokenizer's directory: its chat template and the names of its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, cannot

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
_MAX_BYTES = 1_000_000  # of a template; the JSON files may have a hundred times as many


def companion_files(tokenizer: Path) -> dict[str, Path]:
    """Return those of `FILES` in the directory of a tokenizer file, by name."""
    return {name: path for name in FILES if (path := tokenizer.parent / name).is_file()}


def chat_template(files: Mapping[str, Path]) -> str | None:
    """Return the chat template in the files, or None. Raises DataError."""
    if "chat_template.jinja" in files:
        return _read(files["chat_template.jinja"], _MAX_BYTES)
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json(files, name).get("chat_template")
        if isinstance(found, list):  # several named templates
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def named_token(files: Mapping[str, Path], name: str) -> str | None:
    """Return the token that tokenizer_config.json names `bos_token`, `eos_token`, ... Raises DataError."""
    found = read_json(files, "tokenizer_config.json").get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def named_tokens(files: Mapping[str, Path]) -> dict[str, str]:
    """Return all of `NAMED_TOKENS` that tokenizer_config.json defines. Raises DataError."""
    return {name: text for name in NAMED_TOKENS if (text := named_token(files, name)) is not None}


def read_json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`, an empty one without the file. Raises DataError."""
    if name not in files:
        return {}
    try:
        data = json.loads(_read(files[name], 100 * _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}", file=files[name]) from error
    if not isinstance(data, dict):
        raise DataError("not a JSON object", file=files[name])
    return data


def _read(path: Path, most: int) -> str:
    try:
        if path.stat().st_size > most:
            raise DataError("too large for a file of this name", file=path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise cannot("read it", path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error})", file=path) from error
