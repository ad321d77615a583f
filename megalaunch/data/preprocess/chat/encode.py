"""Encodes a conversation's text as a whole, and masks the tokens of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.tokenizer.tokenizer import Tokenizer, tokenizer_from_json

Span = tuple[int, int]


def encode_with_mask(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """Return the same tokenizer, which also matches the vocabulary entries `names` in texts and adds no tokens.

    Special tokens of SentencePiece, tiktoken and tekken files are otherwise not matched (tokenizer/conversion.py).
    """
    content = json.loads(tokenizer.to_json())
    content["post_processor"] = None  # it may also change offsets
    model, added = content["model"], content["added_tokens"]
    known = {token["content"] for token in added}
    pieces = {piece: number for number, (piece, _) in enumerate(model["vocab"])} if model["type"] == "Unigram" else None
    for name in dict.fromkeys(names):
        number = model["vocab"].get(name) if pieces is None else pieces.get(" " + name, pieces.get(name))
        if name in known or number is None:
            continue
        if pieces is not None:  # replace the hidden name of a piece that no text encodes to
            model["vocab"][number][0] = name
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": number, "content": name, **flags, "special": True})
    added.sort(key=lambda token: token["id"])
    return tokenizer_from_json(json.dumps(content))


def is_within(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return bool [tokens]: whether a token overlaps one of the spans.

    A token without characters counts as one character at its position.
    """
    token_spans = np.array(offsets, np.int64).reshape(-1, 2)
    starts, ends = token_spans[:, 0], np.maximum(token_spans[:, 1], token_spans[:, 0] + 1)
    within = np.zeros(len(token_spans), np.bool_)
    for first, last in spans:
        within |= (starts < last) & (ends > first)
    return within
