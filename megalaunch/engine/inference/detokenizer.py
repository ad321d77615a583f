"""Text from tokens as they come: a character is shown once all of its bytes are there, a stop string never."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megalaunch.data.tokenizer.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)
_CONTEXT = 8  # tokens decoded before the new ones: some decoders treat the first token of a text specially


class IncrementalDetokenizer:
    """The text that tokens add to a prompt, piece by piece; the pieces join to the whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT:])
        self._shown = len(tokenizer.decode(self._window))

    def add(self, token: int) -> str:
        """What is certain now and was not before; often nothing."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= self._shown or text.endswith(_UNFINISHED):
            return ""
        piece = text[self._shown :]
        self._window = self._window[-_CONTEXT:]
        self._shown = len(self._tokenizer.decode(self._window))
        return piece

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._tokenizer.decode(self._window)[self._shown :]


class StopStrings:
    """Passes text on up to the first of some strings, which may come in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._kept = strings, ""
        self.found: str | None = None

    def add(self, piece: str, last: bool = False) -> str:
        """What is certainly before any of the strings; `last`: nothing follows. `found` tells when one is there."""
        text = self._kept + piece
        places = [(text.find(string), -len(string), string) for string in self._strings if string in text]
        if places:
            place, _, self.found = min(places)
            self._kept = ""
            return text[:place]
        certain = len(text) if last else len(text) - max((_overlap(text, one) for one in self._strings), default=0)
        self._kept = text[certain:]
        return text[:certain]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of the text begin the string."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)


def detokenize_stream(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that `tokens` add to the prompt, piece by piece; the pieces join to the whole."""
    growing = IncrementalDetokenizer(tokenizer, prompt)
    pieces = (growing.add(token) for token in tokens)
    yield from (piece for piece in pieces if piece)
    rest = growing.rest()
    if rest:
        yield rest
