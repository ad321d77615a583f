"""The text of one row while its tokens are generated: pieces that are certain, log-probabilities, and why it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.inference.detokenizer import IncrementalDetokenizer, StopStrings


@dataclass(frozen=True)
class TokenLogprob:
    """A token as text, its id, and its log-probability (nats)."""

    token: str
    id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A generated token, and the most likely ones at its position."""

    chosen: TokenLogprob
    top_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class TextDelta:
    """New text of a row. Rows are numbered prompt by prompt, and within a prompt sample by sample."""

    row: int
    text: str


@dataclass(frozen=True)
class Completion:
    """A finished text.

    Args:
        row: The number of the row.
        text: The text, without a stop string.
        tokens: All sampled tokens but an end token; the last ones may decode to text at or after a stop string.
        finish_reason: `end` (an end token), `stop` (a stop string) or `length` (the maximum number of tokens).
        stop: The stop string that was found.
        logprobs: Log-probabilities of each token; None: they were not requested.
    """

    row: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class SequenceText:
    """Turns the sampled tokens of one row into text.

    Args:
        row: The number of the row in what it yields.
        tokenizer: The tokenizer.
        prompt: Tokens of the prompt.
        eos_token_ids: Ids of the tokens that end a text.
        stop: Strings that end a text and are not part of it.
        logprobs: Whether log-probabilities come with the tokens.

    Attributes:
        finished: True once the completion was yielded.
    """

    def __init__(
        self,
        row: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        eos_token_ids: frozenset[int],
        stop: Sequence[str],
        logprobs: bool = False,
    ) -> None:
        self._row, self._tokenizer, self._eos_token_ids = row, tokenizer, eos_token_ids
        self._growing, self._stops = IncrementalDetokenizer(tokenizer, prompt), StopStrings(stop)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if logprobs else None
        self._text = ""
        self.finished = False

    def add(self, token: int, logprobs: RowLogprobs | None = None) -> Iterator[TextDelta | Completion]:
        """Add a sampled token; yield the text that it makes certain, and the completion if it ends the text."""
        if token in self._eos_token_ids:
            yield from self.finish("end")
            return
        self._tokens.append(token)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(name_logprobs(self._tokenizer, token, logprobs))
        yield from self._grow(self._growing.add(token))
        if self._stops.found is not None:
            yield from self.finish("stop")

    def finish(self, reason: str) -> Iterator[TextDelta | Completion]:
        """Yield the remaining text and the completion."""
        self.finished = True
        if self._stops.found is None:
            yield from self._grow(self._growing.rest(), last=True)
        if self._stops.found is not None:
            reason = "stop"
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        yield Completion(self._row, self._text, tuple(self._tokens), reason, self._stops.found, logprobs)

    def _grow(self, text: str, last: bool = False) -> Iterator[TextDelta]:
        """Add text; yield the text that is certain to precede any stop string."""
        shown = self._stops.add(text, last)
        self._text += shown
        if shown:
            yield TextDelta(self._row, shown)


class RowLogprobs(NamedTuple):
    """Log-probabilities (nats) at one position: of the token there, and of the most likely ones with their ids."""

    chosen: float
    top: Sequence[tuple[int, float]]


def name_logprobs(tokenizer: Tokenizer, token: int, logprobs: RowLogprobs) -> TokenLogprobs:
    """Return the log-probabilities with their tokens as text."""

    def named(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(tokenizer.decode([token_id], special=True), token_id, logprob)

    return TokenLogprobs(named(token, logprobs.chosen), tuple(named(*one) for one in logprobs.top))
