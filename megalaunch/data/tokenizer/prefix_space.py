"""Removes a tokenizer's dummy prefix: the space that SentencePiece prepends to a text and removes on decoding.

Without this, parts of a text that are encoded separately would each get it.
"""

from __future__ import annotations

import json
from typing import Any

from megalaunch.data.tokenizer.conversion import PREFIX_PATTERN
from megalaunch.data.tokenizer.tokenizer import Tokenizer, tokenizer_from_json


def without_prefix_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same vocabulary and no prefix space.

    Encoding or decoding a text in parts then gives the same as encoding or decoding the whole.
    """
    content = json.loads(tokenizer.to_json())
    changed = {
        "normalizer": _normalizer(content.get("normalizer")),
        "pre_tokenizer": _pre_tokenizer(content.get("pre_tokenizer")),
        "decoder": _decoder(content.get("decoder")),
    }
    if all(content.get(name) == part for name, part in changed.items()):
        return tokenizer
    return tokenizer_from_json(json.dumps({**content, **changed}))


def _normalizer(part: Any) -> Any:
    if not part:
        return part
    if part["type"] == "Sequence":
        return {**part, "normalizers": [one for one in map(_normalizer, part["normalizers"]) if one]}
    prefixed = part["type"] == "Replace" and str(part["pattern"].get("Regex", "")).startswith(PREFIX_PATTERN)
    return None if part["type"] == "Prepend" or prefixed else part


def _pre_tokenizer(part: Any) -> Any:
    if not part:
        return part
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [*map(_pre_tokenizer, part["pretokenizers"])]}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return _never(part)


def _decoder(part: Any) -> Any:
    if not part:
        return part
    if part["type"] == "Sequence":
        return {**part, "decoders": [one for one in map(_decoder, part["decoders"]) if one]}
    if part["type"] == "Strip" and part["content"] == " " and part["start"]:
        return {**part, "start": 0} if part["stop"] else None
    return _never(part)


def _never(part: dict[str, Any]) -> dict[str, Any]:
    """Return a Metaspace step that prepends nothing; other steps unchanged."""
    if part["type"] != "Metaspace":
        return part
    rest = {name: value for name, value in part.items() if name not in ("add_prefix_space", "str_rep")}
    return {**rest, "prepend_scheme": "never"}
