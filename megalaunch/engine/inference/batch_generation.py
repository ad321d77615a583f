"""Batched generation for many prompts, streamed as pieces of text and finished completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.inference.detokenizer import IncrementalDetokenizer, StopStrings
from megalaunch.engine.inference.generate import GenerationConfig, SampledTokens, TextModel, generate_tokens


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


@dataclass
class _SequenceState:
    """The state of a row while it is generated."""

    number: int
    growing: IncrementalDetokenizer
    stops: StopStrings
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    text: str = ""
    finished: bool = False

    def grow(self, text: str, last: bool = False) -> Iterator[TextDelta]:
        """Add text; yield the text that is certain to precede any stop string."""
        shown = self.stops.add(text, last)
        self.text += shown
        if shown:
            yield TextDelta(self.number, shown)

    def finish(self, reason: str) -> Iterator[TextDelta | Completion]:
        """Yield the remaining text and the completion."""
        self.finished = True
        if self.stops.found is None:
            yield from self.grow(self.growing.rest(), last=True)
        if self.stops.found is not None:
            reason = "stop"
        yield Completion(
            self.number,
            self.text,
            tuple(self.tokens),
            reason,
            self.stops.found,
            None if self.logprobs is None else tuple(self.logprobs),
        )


@dataclass(frozen=True)
class BatchGenerator:
    """Generates texts with a model and its tokenizer. `stop`: strings that end a text and are not part of it."""

    model: TextModel
    tokenizer: Tokenizer
    config: GenerationConfig
    stop: tuple[str, ...] = ()

    def generate(
        self, prompts: Sequence[Sequence[int]], num_samples: int, batch_size: int
    ) -> Iterator[TextDelta | Completion]:
        """Generate `num_samples` texts per prompt, `batch_size` rows at once; a row's last item is its completion."""
        rows = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
        for first in range(0, len(rows), batch_size):
            yield from self._batch(first, rows[first : first + batch_size])

    def _batch(self, first: int, asked: Sequence[tuple[Sequence[int], int]]) -> Iterator[TextDelta | Completion]:
        rows = [
            _SequenceState(
                first + index,
                IncrementalDetokenizer(self.tokenizer, prompt),
                StopStrings(self.stop),
                logprobs=self._no_logprobs(),
            )
            for index, (prompt, _) in enumerate(asked)
        ]
        ended = [False] * len(rows)
        prompts, samples = [prompt for prompt, _ in asked], [sample for _, sample in asked]
        for drawn in generate_tokens(self.model, prompts, self.config, samples, ended):
            for index, row in enumerate(rows):
                if not row.finished:
                    yield from self._add(row, index, drawn)
                    ended[index] = row.finished
        for row in rows:
            if not row.finished:
                yield from row.finish("length")

    def _add(self, row: _SequenceState, index: int, drawn: SampledTokens) -> Iterator[TextDelta | Completion]:
        token = int(drawn.tokens_B[index])
        if token in self.config.eos_token_ids:
            yield from row.finish("end")
            return
        row.tokens.append(token)
        if row.logprobs is not None:
            row.logprobs.append(self._token_logprobs(token, index, drawn))
        yield from row.grow(row.growing.add(token))
        if row.stops.found is not None:
            yield from row.finish("stop")

    def _no_logprobs(self) -> list[TokenLogprobs] | None:
        return None if self.config.logprobs is None else []

    def _token_logprobs(self, token: int, index: int, drawn: SampledTokens) -> TokenLogprobs:
        assert drawn.logprobs is not None
        chosen_B, ids_Bn, top_Bn = drawn.logprobs
        top = zip(ids_Bn[index].tolist(), top_Bn[index].tolist(), strict=True)
        return TokenLogprobs(
            self._token_logprob(token, float(chosen_B[index])), tuple(self._token_logprob(*one) for one in top)
        )

    def _token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(self.tokenizer.decode([token], special=True), token, logprob)
