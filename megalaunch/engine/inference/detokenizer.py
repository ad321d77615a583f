"""Incremental detokenization: a character is returned once all of its bytes are complete, a stop string never."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megalaunch.data.tokenizer.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # a decoder's output for bytes that are not (yet) a complete character
_CONTEXT = 8  # tokens decoded before the new ones: some decoders treat the first token of a text specially


class IncrementalDetokenizer:
    """Converts the tokens after a prompt to pieces of text, which concatenate to the full text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT:])
        self._shown = len(tokenizer.decode(self._window))

    def add(self, token: int) -> str:
        """Add a token; return the text that is complete now and was not before, often empty."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= self._shown or text.endswith(_UNFINISHED):
            return ""
        piece = text[self._shown :]
        self._window = self._window[-_CONTEXT:]
        self._shown = len(self._tokenizer.decode(self._window))
        return piece

    def rest(self) -> str:
        """Return the remaining text, after the last token."""
        return self._tokenizer.decode(self._window)[self._shown :]


class StopStrings:
    """Passes text through up to the first stop string, which may be split over pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._kept = strings, ""
        self.found: str | None = None

    def add(self, piece: str, last: bool = False) -> str:
        """Add a piece; return the text certain to precede any stop string. `last`: no piece follows. Sets `found`."""
        text = self._kept + piece
        matches = [(text.find(string), -len(string), string) for string in self._strings if string in text]
        if matches:
            first, _, self.found = min(matches)
            self._kept = ""
            return text[:first]
        certain = len(text) if last else len(text) - max((_overlap(text, one) for one in self._strings), default=0)
        self._kept = text[certain:]
        return text[:certain]


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of the text are a prefix of the string."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)


def detokenize_stream(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of the tokens after a prompt, in pieces."""
    growing = IncrementalDetokenizer(tokenizer, prompt)
    pieces = (growing.add(token) for token in tokens)
    yield from (piece for piece in pieces if piece)
    rest = growing.rest()
    if rest:
        yield rest
