"""A conversation's text to tokens, all of it at once, and which of them are of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.tokenizer.tokenizer import Tokenizer, tokenizer_from_json

Span = tuple[int, int]


def encode_with_mask(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """The same tokenizer, which finds `names` in texts, where they are in its vocabulary, and adds nothing to a text.

    Those of SentencePiece, tiktoken and tekken files it does not look for by itself (see tokenizer/conversion.py).
    """
    content = json.loads(tokenizer.to_json())
    content["post_processor"] = None  # which may also move offsets
    model, added = content["model"], content["added_tokens"]
    known = {token["content"] for token in added}
    pieces = {piece: number for number, (piece, _) in enumerate(model["vocab"])} if model["type"] == "Unigram" else None
    for name in dict.fromkeys(names):
        number = model["vocab"].get(name) if pieces is None else pieces.get(" " + name, pieces.get(name))
        if name in known or number is None:
            continue
        if pieces is not None:  # the hidden name of one that no text gives
            model["vocab"][number][0] = name
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": number, "content": name, **flags, "special": True})
    added.sort(key=lambda token: token["id"])
    return tokenizer_from_json(json.dumps(content))


def is_within(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character of one of the spans; one without characters goes by where it stands."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
    within = np.zeros(len(places), np.bool_)
    for first, last in spans:
        within |= (starts < last) & (ends > first)
    return within
