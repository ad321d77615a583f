"""Batched generation for many prompts, streamed as pieces of text and finished completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.inference.generate import GenerationConfig, SampledTokens, TextModel, generate_tokens
from megalaunch.engine.inference.sequence_text import Completion, RowLogprobs, SequenceText, TextDelta


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
        rows = [self._text(first + index, prompt) for index, (prompt, _) in enumerate(asked)]
        ended = [False] * len(rows)
        prompts, samples = [prompt for prompt, _ in asked], [sample for _, sample in asked]
        for drawn in generate_tokens(self.model, prompts, self.config, samples, ended):
            for index, row in enumerate(rows):
                if not row.finished:
                    yield from row.add(int(drawn.tokens_B[index]), _row_logprobs(drawn, index))
                    ended[index] = row.finished
        for row in rows:
            if not row.finished:
                yield from row.finish("length")

    def _text(self, number: int, prompt: Sequence[int]) -> SequenceText:
        logprobs = self.config.logprobs is not None
        return SequenceText(number, self.tokenizer, prompt, self.config.eos_token_ids, self.stop, logprobs)


def _row_logprobs(drawn: SampledTokens, index: int) -> RowLogprobs | None:
    return None if drawn.logprobs is None else drawn.logprobs.row(index)
