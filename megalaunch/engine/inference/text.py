"""Text from tokens as they come: a character is shown once all of its bytes are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megalaunch.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)
_CONTEXT = 8  # tokens decoded before the new ones: some decoders treat the first token of a text specially


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that `tokens` add to the prompt, piece by piece; the pieces join to the whole."""
    window = list(prompt[-_CONTEXT:])
    shown = len(tokenizer.decode(window))
    for token in tokens:
        window.append(token)
        text = tokenizer.decode(window)
        if len(text) > shown and not text.endswith(_UNFINISHED):
            yield text[shown:]
            window = window[-_CONTEXT:]
            shown = len(tokenizer.decode(window))
    rest = tokenizer.decode(window)[shown:]
    if rest:
        yield rest
