"""Generation requests: prompts of any number and length, and the settings of their continuations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megalaunch.engine.inference.batch_generation import BatchGenerator
from megalaunch.engine.inference.chat_template import chat_texts
from megalaunch.engine.inference.generate import GenerationConfig, TextModel
from megalaunch.engine.inference.load_model import LanguageModel, ModelSource
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion, TextDelta
from megalaunch.schema.model import ModelSpec


@dataclass(frozen=True)
class GenerationRequest:
    """Settings of a generation request.

    Args:
        max_new_tokens: Maximum number of tokens per completion.
        sampling: The sampling parameters.
        stop: Strings that end a text and are not part of it.
        num_samples: Completions per prompt.
        batch_size: Rows per forward pass.
        logprobs: The number of top log-probabilities per token, as in `GenerationConfig`.
        eager: Capture no graphs of decode steps, as in `GenerationConfig`.

    Raises:
        ValueError: A setting is out of range; the message names it.
    """

    max_new_tokens: int = 200
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    batch_size: int = 8
    logprobs: int | None = None
    eager: bool = False

    def __post_init__(self) -> None:
        counts = {"max-new-tokens": self.max_new_tokens, "num-samples": self.num_samples, "batch-size": self.batch_size}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be 1 or more, not {count}")
        if "" in self.stop:
            raise ValueError("a stop string is empty: every text would end at once")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be 0 or more, not {self.logprobs}")


def tokenize_prompts(model: ModelSource, prompts: Sequence[str | Sequence[dict[str, str]]]) -> list[list[int]]:
    """Tokenize prompts; a conversation is rendered by the chat template first. Raises as `chat_texts` does.

    A text gets special tokens such as BOS as `ModelSource.add_special_tokens` says; a template writes its own.
    """
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    rendered = iter(chat_texts(model.files, chats) if chats else ())
    return [
        model.encode(prompt) if isinstance(prompt, str) else model.tokenizer.encode(next(rendered))
        for prompt in prompts
    ]


def validate_prompts(
    model: ModelSource, prompts: Sequence[str | Sequence[dict[str, str]]], request: GenerationRequest
) -> list[list[int]]:
    """Tokenize prompts and check their length (`check_context_length`); needs no weights. Raises ValueError."""
    tokens = tokenize_prompts(model, prompts)
    check_context_length(model.spec.model, tokens, request.max_new_tokens)
    return tokens


def check_context_length(spec: ModelSpec, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError for the first prompt that is empty, or exceeds the model's context with its new tokens."""
    for number, tokens in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not tokens:
            raise ValueError(f"{which} is empty: give the model at least a word to continue")
        longest = spec.max_position_embeddings
        if len(tokens) + max_new_tokens > longest:
            left = longest - len(tokens)
            fix = f"ask for at most {left} new ones (--max-new-tokens)" if left > 0 else "shorten the prompt"
            raise ValueError(
                f"{which} of {len(tokens)} tokens and {max_new_tokens} new ones are more than the "
                f"{longest} that the model is made for (model.max_position_embeddings); {fix}"
            )


def generate_texts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], request: GenerationRequest, by: TextModel | None = None
) -> Iterator[TextDelta | Completion]:
    """Generate completions of all prompts, as pieces of text and finished completions.

    Args:
        model: The language model.
        prompts: Token ids.
        request: The settings.
        by: A model that computes the logits in place of `model.decoder`.

    Raises:
        ValueError: A prompt is empty or too long; raised before the first forward pass.
    """
    return generate_with(by or model.decoder, model, prompts, request)


def generate_with(
    computing: TextModel, source: ModelSource, prompts: Sequence[Sequence[int]], request: GenerationRequest
) -> Iterator[TextDelta | Completion]:
    """Generate completions as `generate_texts` does, with `computing` for the logits of the source's model."""
    check_context_length(source.spec.model, prompts, request.max_new_tokens)
    config = GenerationConfig(
        request.max_new_tokens,
        request.sampling,
        source.eos_token_ids,
        source.tokenizer.vocab_size,
        request.logprobs,
        request.eager,
    )
    writer = BatchGenerator(computing, source.tokenizer, config, request.stop)
    return writer.generate(prompts, request.num_samples, request.batch_size)


def length_note(model: ModelSource, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str | None:
    """Return a warning if a text may become longer than the model's training sequences, else None."""
    trained, asked = model.spec.batch.sequence_length, max(map(len, prompts), default=0) + max_new_tokens
    if asked <= trained:
        return None
    return f"the text may grow to {asked} tokens; this model was trained on {trained} at a time and may lose the thread"
