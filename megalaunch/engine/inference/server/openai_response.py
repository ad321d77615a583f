"""Responses of OpenAI's completions and chat completions: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megalaunch.engine.inference.sequence_text import Completion, TokenLogprob, TokenLogprobs
from megalaunch.engine.inference.server.openai_request import TextRequest

_FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass
class FinishedText:
    """What is known of one text of a request when it has ended."""

    completion: Completion
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return _FINISH_REASONS[self.completion.finish_reason]


@dataclass
class Response(ABC):
    """Writes the response to one request.

    Args:
        request: The request.
        model: The name of the model.
    """

    request: TextRequest
    model: str
    id: str = field(init=False)
    created: int = field(init=False)
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    @abstractmethod
    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return a choice of a whole response, but for its index and finish reason."""

    @abstractmethod
    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Return a choice of the chunk before any text; None: there is none."""

    @abstractmethod
    def delta_choice(self, text: str) -> dict[str, Any]:
        """Return a choice of a chunk with new text."""

    @abstractmethod
    def last_choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return a choice of a text's last chunk, which has all its log-probabilities."""

    def whole(self, texts: Sequence[FinishedText]) -> dict[str, Any]:
        """Return the whole response."""
        choices = [
            {"index": index, **self.choice(index, text), "finish_reason": text.finish_reason}
            for index, text in enumerate(texts)
        ]
        return {**self._head(self.whole_object), "choices": choices, "usage": self._usage(texts)}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before any text."""
        found = [(index, self.first_choice(index)) for index in range(len(self.request.texts))]
        return [self._chunk(index, choice) for index, choice in found if choice is not None]

    def delta_chunk(self, index: int, text: str) -> dict[str, Any]:
        """Return the chunk of new text."""
        return self._chunk(index, self.delta_choice(text))

    def last_chunk(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return the last chunk of a text."""
        return self._chunk(index, self.last_choice(index, text), text.finish_reason)

    def usage_chunk(self, texts: Sequence[FinishedText]) -> dict[str, Any]:
        """Return the chunk that ends a stream with the numbers of tokens."""
        return {**self._head(self.chunk_object), "choices": [], "usage": self._usage(texts)}

    def _chunk(self, index: int, choice: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        one = {"index": index, "logprobs": None, **choice, "finish_reason": finish_reason}
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._head(self.chunk_object), "choices": [one], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, texts: Sequence[FinishedText]) -> dict[str, int]:
        prompt, new = self.request.num_prompt_tokens, sum(len(text.completion.tokens) for text in texts)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class CompletionResponse(Response):
    """The response to a request for completions."""

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return text and log-probabilities."""
        return {"text": self._prompt(index) + text.completion.text, "logprobs": self._logprobs(index, text)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Return the prompt, if it is echoed."""
        return {"text": self._prompt(index)} if self.request.prompts else None

    def delta_choice(self, text: str) -> dict[str, Any]:
        """Return new text."""
        return {"text": text}

    def last_choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return no more text."""
        return {"text": "", "logprobs": self._logprobs(index, text)}

    def _prompt(self, index: int) -> str:
        return self.request.prompts[index // self.request.num_choices].text if self.request.prompts else ""

    def _logprobs(self, index: int, text: FinishedText) -> dict[str, Any] | None:
        """Return lists with one entry per token. The first token of an echoed prompt has no probability: null."""
        if text.completion.logprobs is None:
            return None
        scored = [*text.prompt_logprobs, *text.completion.logprobs]
        prompts = self.request.prompts
        first = [prompts[index // self.request.num_choices].first_token] if prompts else []
        tokens = [*first, *(one.chosen.token for one in scored)]
        offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in first), *(one.chosen.logprob for one in scored)],
            "top_logprobs": [*(None for _ in first), *(_most_likely(one) for one in scored)],
            "text_offset": offsets,
        }


def _most_likely(one: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens, and the chosen one; of tokens with the same text the most likely counts."""
    found: dict[str, float] = {}
    for top in (*one.top_logprobs, one.chosen):
        found.setdefault(top.token, top.logprob)
    return found


class ChatResponse(Response):
    """The response to a request for a chat completion."""

    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return the message and log-probabilities."""
        message = {"role": "assistant", "content": text.completion.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(text)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta_choice(self, text: str) -> dict[str, Any]:
        """Return new text."""
        return {"delta": {"content": text}}

    def last_choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """Return no more text."""
        return {"delta": {}, "logprobs": self._logprobs(text)}

    def _logprobs(self, text: FinishedText) -> dict[str, Any] | None:
        if text.completion.logprobs is None:
            return None
        content = [
            {**_named(one.chosen), "top_logprobs": [_named(top) for top in one.top_logprobs]}
            for one in text.completion.logprobs
        ]
        return {"content": content, "refusal": None}


def _named(one: TokenLogprob) -> dict[str, Any]:
    """Return a token as OpenAI names one; the bytes of a part of a character are not known."""
    whole = "\ufffd" not in one.token
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode()) if whole else None}
